"""Which ports the demo uses: friendly fixed ones from a base, or the same pattern a thousand higher where one is taken.

They are all below the range from which systems give ports to outgoing connections.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from narwhal.errors import NarwhalError

BASE: Final = 8000
STEP: Final = 1000
HIGHEST: Final = 32_000
ROUTERS: Final = 2


class NoPorts(NarwhalError):
    """No set of ports is free."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports from `base` on: 8000 gives routers 8000 and 8001, admin 8100 and 8101, Redis 8379, engines 8201 on.

    Each stub engine has a second door, 100 above its first, for faults.
    """

    base: int

    def traffic(self, index: int) -> int:
        """Client traffic and /ready of a router, counted from 0."""
        return self.base + index

    def admin(self, index: int) -> int:
        """The admin port of a router, counted from 0."""
        return self.base + 100 + index

    def engine(self, index: int) -> int:
        """A stub engine, counted from 0."""
        return self.base + 201 + index

    def engine_admin(self, index: int) -> int:
        """A stub engine's second door."""
        return self.base + 301 + index

    @property
    def redis(self) -> int:
        """The private Redis-compatible server."""
        return self.base + 379

    def used(self, *, engines: int, redis: bool) -> list[int]:
        """Return every port that a demo with so many stub engines listens on."""
        return [
            *(self.traffic(index) for index in range(ROUTERS)),
            *(self.admin(index) for index in range(ROUTERS)),
            *(self.engine(index) for index in range(engines)),
            *(self.engine_admin(index) for index in range(engines)),
            *([self.redis] if redis else []),
        ]


def choose_ports(base: int, *, engines: int, redis: bool) -> tuple[Ports, str | None]:
    """Return free ports from `base` or from the next thousand that is free, and a remark when it is not `base`.

    Raises NoPorts.
    """
    first_taken = None
    for start in range(base, max(base + 1, HIGHEST), STEP):
        ports = Ports(start)
        taken = next((port for port in ports.used(engines=engines, redis=redis) if not is_free(port)), None)
        if taken is None:
            if first_taken is None:
                return ports, None
            return ports, f"port {first_taken} is in use, so everything is at {start} and up instead of {base}"
        first_taken = first_taken or taken
    raise NoPorts(
        f"port {first_taken} is in use, and so is one of every other set up to {HIGHEST};"
        " choose another base with --ports-from N"
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
        return True
