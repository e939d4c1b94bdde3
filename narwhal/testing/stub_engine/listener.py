"""The engine's door: a listening socket that can be shut and opened again on the same port."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class Listener:
    """Listens on one address. Port 0 is replaced by the free port that the first `open` finds."""

    def __init__(self, factory: ProtocolFactory, host: str, port: int) -> None:
        self._factory = factory
        self._host = host
        self._port = port
        self._server: asyncio.AbstractServer | None = None

    @property
    def port(self) -> int:
        """The port; 0 before the first `open` if none was asked for."""
        return self._port

    @property
    def is_open(self) -> bool:
        """Whether new connections are accepted."""
        return self._server is not None

    async def open(self) -> None:
        """Accept connections. Raises OSError when the address is taken."""
        if self._server is None:
            server = await asyncio.get_running_loop().create_server(self._factory, self._host, self._port)
            self._port = server.sockets[0].getsockname()[1]
            self._server = server

    def close(self) -> None:
        """Refuse new connections; those that exist are not touched."""
        if self._server is not None:
            self._server.close()
            self._server = None


class ResetAtOnce(asyncio.Protocol):
    """Accepts a connection and resets it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Reset what was just accepted."""
        # Not checked with isinstance: uvloop's transports are none of asyncio's classes.
        reset(cast(asyncio.Transport, transport))


def reset(transport: asyncio.Transport) -> None:
    """Close the connection so that the other side sees RST instead of FIN."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
