"""What the client-facing side works with; the composition root fills it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narwhal.core.control_plane import ControlPlane
from narwhal.core.events import FleetEvent
from narwhal.ports import Clock, EngineData
from narwhal.serving.lifeline import Lifeline
from narwhal.serving.metrics import Metrics


def no_cards() -> Sequence[Mapping[str, Any]]:
    """Return no model cards: nothing was read from an engine yet."""
    return ()


def ignore_stale_token() -> None:
    """Do nothing: a router without a lease cannot be overtaken."""


@dataclass(frozen=True, slots=True)
class ServingDeps:
    """Everything that serving needs from the rest of the router.

    `report` is the way into the core for evidence. `clock` is the lease clock. `model_cards` returns the engines' own
    cards of /v1/models as last read. `on_stale_token` is called when an engine has seen a higher fencing token than
    ours: somebody else was granted the lease. `lifeline` is what a standby holds on to.
    """

    plane: ControlPlane
    engines: EngineData
    report: Callable[[FleetEvent], None]
    clock: Clock
    metrics: Metrics
    lifeline: Lifeline
    model_cards: Callable[[], Sequence[Mapping[str, Any]]] = no_cards
    on_stale_token: Callable[[], None] = ignore_stale_token
