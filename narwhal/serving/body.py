"""Reads a request's body within its limit, and asks for it only when it is wanted."""

from __future__ import annotations

from aiohttp import HttpVersion11, web

from narwhal.serving.openai import ApiError, invalid

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def read_body(request: web.BaseRequest, bytes_max: int) -> bytes | ApiError:
    """Return the body, or why it is refused; a client that waits to be asked (100-continue) is asked here."""
    if (request.content_length or 0) > bytes_max:
        return too_large(bytes_max)
    expected = request.headers.get("Expect")
    if expected is not None and request.version >= HttpVersion11:
        if expected.lower() != "100-continue":
            return invalid(f"cannot meet the expectation {expected[:40]!r}", status=417)
        if request.transport is not None:
            request.transport.write(CONTINUE)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        return too_large(bytes_max)
    except web.RequestPayloadError as error:
        return invalid(f"the request body could not be read: {error}")


def too_large(bytes_max: int) -> ApiError:
    """Return the refusal of a body above the limit, which it names."""
    text = f"the request body is larger than {bytes_max} bytes (serving.max_body_bytes)"
    return invalid(text, status=413, code="request_too_large")
