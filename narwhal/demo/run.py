"""One demo from start to end: bring the fleet up, show it or drill it, and take it down whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

import aiohttp
from rich.console import Console
from rich.markup import escape

from narwhal.demo.drill import KillActiveDrill
from narwhal.demo.fleet import DemoFailed, Fleet, Say, look_at
from narwhal.demo.plan import DemoOptions
from narwhal.demo.screen import describe, show

Answer = TypeVar("Answer")

WATCH_EVERY_S: Final = 0.2
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


async def run_demo(options: DemoOptions, *, as_json: bool) -> int:
    """Run the pair until SIGINT or SIGTERM and return the exit code; 1 when it could not be brought or kept up."""
    console = Console(stderr=as_json)
    async with _running(options, console) as (fleet, stopped):
        active = await _first(fleet.wait_until_whole(), stopped)
        if active is None:
            return EXIT_OK
        if as_json:
            print_document(describe(fleet, active), indent=None)
        else:
            show(console, fleet, active)
        watching = asyncio.create_task(_tell_who_is_active(console, fleet, active.id))
        try:
            await _either(stopped, fleet.failed)
        finally:
            watching.cancel()
        if fleet.failed.done():
            raise DemoFailed(fleet.failed.result())
    return EXIT_OK


async def run_drill(options: DemoOptions, *, as_json: bool) -> int:
    """Run the drill `kill-active` unattended, print its result, and return 0 only if everything held."""
    console = Console(stderr=True)
    async with _running(options, console) as (fleet, stopped):
        findings = await _first(KillActiveDrill(fleet, say=_teller(console)).run(), stopped)
    if findings is None:
        return EXIT_INTERRUPTED
    document = findings.document()
    if as_json:
        print_document(document)
    else:
        for name, value in document.items():
            sys.stdout.write(f"{name:<32} {json.dumps(value)}\n")
    problems = findings.problems()
    for problem in problems:
        console.print(f"[bold red]drill failed:[/] {problem}", highlight=False, soft_wrap=True)
    if findings.late:
        console.print("takeover took longer than the lease and half a second", highlight=False)
    if not problems:
        console.print(f"[bold green]drill passed:[/] takeover in {findings.takeover_ms:.0f} ms", highlight=False)
    return EXIT_FAILED if problems else EXIT_OK


def print_document(document: object, *, indent: int | None = 1) -> None:
    """Print one JSON document on standard output at once."""
    sys.stdout.write(json.dumps(document, indent=indent) + "\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _running(options: DemoOptions, console: Console) -> AsyncIterator[tuple[Fleet, asyncio.Future[None]]]:
    """Give the started fleet and a future that is done when we are told to stop; end everything afterwards."""
    fleet = Fleet(options, say=_teller(console))
    stopped = _listen_to_signals(fleet)
    own = [*([] if options.redis_url else ["Redis"]), *([] if options.engines else ["stub engines"])]
    console.print(f"starting {', '.join([*own, 'two routers'])} ...", highlight=False)
    try:
        await fleet.start()
        yield fleet, stopped
    finally:
        console.print("stopping everything ...", highlight=False)
        await fleet.stop()


def _listen_to_signals(fleet: Fleet) -> asyncio.Future[None]:
    """The first signal asks to stop, a second one ends every process at once."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def told_to_stop() -> None:
        if stopped.done():
            fleet.hurry()
        else:
            stopped.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, told_to_stop)
    return stopped


async def _first(work: Coroutine[Any, Any, Answer], stopped: asyncio.Future[None]) -> Answer | None:
    """Return what `work` returns, or None when we were told to stop before it was done."""
    task = asyncio.create_task(work)
    try:
        await _either(task, stopped)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _either(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _tell_who_is_active(console: Console, fleet: Fleet, active: str | None) -> None:
    """Say whenever another router serves, or none does, until cancelled."""
    say = _teller(console)
    loop = asyncio.get_running_loop()
    since = loop.time()
    async with aiohttp.ClientSession(trust_env=False) as session:
        while True:
            looks = await asyncio.gather(*(look_at(session, router.url) for router in fleet.plan.routers))
            serving = [r.id for r, (status, _) in zip(fleet.plan.routers, looks, strict=True) if status == 200]
            now_active = serving[0] if serving else None
            if now_active != active:
                gap = f" after {loop.time() - since:.1f} s" if active is None else ""
                say(f"{now_active} is active{gap}" if now_active else f"{active} does not serve any more")
                active, since = now_active, loop.time()
            await asyncio.sleep(WATCH_EVERY_S)


def _teller(console: Console) -> Say:
    def say(message: str) -> None:
        console.print(f"[dim]demo:[/] {escape(message)}", highlight=False, soft_wrap=True)

    return say
