"""How an active answers a standby that claims the lease: it gives way only if it is not fit to serve.

Source: decisions 8, 29 and 37.
"""

from __future__ import annotations

from dataclasses import dataclass

from narwhal.core.control_plane import ControlPlane
from narwhal.core.lease import Claim


@dataclass(frozen=True, slots=True)
class Yield:
    """Fence, write the last handoff, release to the claimant."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Stay; `reason` goes to the log."""

    reason: str


def answer_claim(plane: ControlPlane, claim: Claim) -> Yield | Refuse:
    """Return whether the holder gives way to `claim`."""
    if claim.token != plane.tenure.token:
        return Refuse(f"the claim is against token {claim.token}, not {plane.tenure.token}")
    if plane.monitoring.degraded is None:
        return Refuse("this router is fit")
    return Yield()
