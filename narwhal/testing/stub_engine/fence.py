"""The floors that an engine keeps against routers that lost their lease. Source: ha.md, 2.9.

A request that is newly admitted must carry at least the highest fencing token seen so far. The decode leg of a request
that an older router admitted may still run, unless a hard floor was set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narwhal.testing.stub_engine.bodies import WireError, bad_request

FENCE_HEADER = "X-Narwhal-Fence"
PHASE_HEADER = "X-Narwhal-Phase"
ADMIT_FLOOR_HEADER = "X-Narwhal-Admit-Floor"
HARD_FLOOR_HEADER = "X-Narwhal-Hard-Floor"


@dataclass(slots=True)
class Fence:
    """The two floors, both 0 at first. They outlive a restart, as a shim's file would make them."""

    admit_floor: int = 0
    hard_floor: int = 0
    refused: int = 0
    unfenced: int = 0

    def check(self, headers: Mapping[str, str]) -> None:
        """Learn the token in `headers`. Raises WireError: 409 for a stale router, 400 for an unreadable token."""
        text = headers.get(FENCE_HEADER)
        if text is None:
            self.unfenced += 1
            return
        phase = headers.get(PHASE_HEADER, "admit")
        if not (text.isascii() and text.isdigit()) or phase not in ("admit", "decode"):
            raise bad_request(f"{FENCE_HEADER} must be a number and {PHASE_HEADER} admit or decode.", FENCE_HEADER)
        token = int(text)
        floor = self.hard_floor if phase == "decode" else max(self.admit_floor, self.hard_floor)
        if token < floor:
            self.refused += 1
            raise WireError(
                409, f"fencing token {token} is below the {phase} floor {floor}", "stale_router", FENCE_HEADER
            )
        self.admit_floor = max(self.admit_floor, token)

    def raise_hard(self, token: int) -> None:
        """Refuse every leg below `token` from now on. A floor never sinks."""
        self.hard_floor = max(self.hard_floor, token)
        self.admit_floor = max(self.admit_floor, token)

    def headers(self) -> dict[str, str]:
        """Return the floors as /health reports them."""
        return {ADMIT_FLOOR_HEADER: str(self.admit_floor), HARD_FLOOR_HEADER: str(self.hard_floor)}

    def describe(self) -> dict[str, Any]:
        """Return the floors and what they refused, as JSON."""
        return {
            "admit_floor": self.admit_floor,
            "hard_floor": self.hard_floor,
            "refused": self.refused,
            "unfenced": self.unfenced,
        }
