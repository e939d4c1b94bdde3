"""The faults that meet a request of any kind before it is answered, and how a connection is broken."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aiohttp import web

from narwhal.testing.stub_engine.answers import json_answer
from narwhal.testing.stub_engine.engine import StubEngine
from narwhal.testing.stub_engine.faults import Fault, FaultKind
from narwhal.testing.stub_engine.listener import reset
from narwhal.testing.stub_engine.schedule import Plan
from narwhal.testing.stub_engine.state import Residence


async def meet(engine: StubEngine, request: web.Request, plan: Plan, residence: Residence) -> web.Response | None:
    """Go through the faults of `plan` that come before an answer; return an answer if one of them gives it."""
    if plan.get(FaultKind.RESTART):
        residence.severed = True
        await engine.restart_generation()
        await never()
    if plan.get(FaultKind.RESET):
        await sever(request, residence, with_reset=True)
    await plan.until_lifted(FaultKind.HANG)
    if delay := plan.get(FaultKind.DELAY):
        await asyncio.sleep(delay.delay_ms / 1000)
    if status := plan.get(FaultKind.STATUS):
        return _status_answer(status, request)
    return None


async def sever(request: web.Request, residence: Residence, *, with_reset: bool) -> NoReturn:
    """Break the connection, by RST or by FIN after what was written; the request ends with the connection."""
    residence.severed = True
    if request.transport is not None:
        if with_reset:
            reset(request.transport)
        else:
            request.transport.close()
    await never()


async def never() -> NoReturn:
    """Wait until the client goes away, which cancels the request."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


def _status_answer(fault: Fault, request: web.Request) -> web.Response:
    headers = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
    if request.path == "/health" and fault.body is None:
        return web.Response(status=fault.status, headers=headers)
    if fault.body is not None:
        return web.Response(
            body=fault.body.encode(), status=fault.status, headers=headers, content_type=_type_of(fault)
        )
    kind = _ERROR_TYPES.get(fault.status, "InternalServerError" if fault.status >= 500 else "BadRequestError")
    message = "The server had an error while processing your request." if fault.status >= 500 else "scripted fault"
    document = {"error": {"message": message, "type": kind, "param": None, "code": fault.status}}
    return json_answer(document, status=fault.status, headers=headers)


def _type_of(fault: Fault) -> str:
    return "application/json" if (fault.body or "").lstrip().startswith(("{", "[")) else "text/plain"


_ERROR_TYPES = {404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailableError"}
