"""One answer to /ready, to admission, and to the standby that watches.

| reason | ready | control_ready |
|---|---|---|
| `active` | yes | yes |
| `stopping` | no | yes |
| `standby` or `standby: <why it could not take over>` | no | whether its own monitoring is clean |
| `fenced: <why>` | no | no |
| `monitoring degraded: <stage> <class>` | no | no |
| `no eligible <role> engine` or `no eligible prefill and decode engines` | no | yes |

Source: source, "Monitoring and readiness" and "Last-engine protection"; decisions 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from narwhal.core.vocabulary import Role


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the router admits, why not, and whether its own control is fit whatever the engines are doing."""

    ready: bool
    reason: str
    control_ready: bool


READY: Final = Readiness(ready=True, reason="active", control_ready=True)
STOPPING: Final = Readiness(ready=False, reason="stopping", control_ready=True)


def standby(*, why_not: str | None, clean: bool) -> Readiness:
    """Return the answer of a router that follows; `why_not` says why it could not take over now."""
    return Readiness(ready=False, reason="standby" if why_not is None else f"standby: {why_not}", control_ready=clean)


def fenced(why: str) -> Readiness:
    """Return the answer of a router that must not admit and knows it."""
    return Readiness(ready=False, reason=f"fenced: {why}", control_ready=False)


def degraded(stage_and_class: str) -> Readiness:
    """Return the answer of a router whose monitor failed too often."""
    return Readiness(ready=False, reason=f"monitoring degraded: {stage_and_class}", control_ready=False)


def exhausted(roles: tuple[Role, ...]) -> Readiness:
    """Return the answer of a fit router without capacity for `roles`."""
    words = " and ".join(roles)
    return Readiness(
        ready=False, reason=f"no eligible {words} engine{'s' if len(roles) > 1 else ''}", control_ready=True
    )
