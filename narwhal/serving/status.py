"""The control plane as plain documents, for the admin endpoints, the CLI and people."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from narwhal.core.control_plane import ControlPlane
from narwhal.core.engine import Engine, PendingProbe
from narwhal.core.holds import Hold
from narwhal.core.vocabulary import EngineId, HoldKind, ProbeKind


def router_status(plane: ControlPlane, *, now: float, lease_now: float) -> dict[str, Any]:
    """Return who this router is, whether it serves, and how its own control is doing. Times in seconds."""
    answer = plane.readiness(now=now, lease_now=lease_now)
    tenure = plane.tenure
    return {
        "router": plane.config.router.id,
        "cluster": plane.config.ha.cluster,
        "role": plane.role,
        "ready": answer.ready,
        "reason": answer.reason,
        "control_ready": answer.control_ready,
        "fencing_token": tenure.token,
        "incarnation": tenure.record.incarnation if tenure.record is not None else None,
        "lease_remaining_s": None if tenure.valid_until == inf else round(tenure.remaining_s(lease_now), 3),
        "owner": plane.owner,
        "owner_url": plane.owner_url,
        "handoff_version": plane.version,
        "monitoring": {
            "passes": plane.monitoring.passes,
            "streak": plane.monitoring.streak,
            "degraded": plane.monitoring.degraded,
        },
        "consolidation_risk": {role: round(now - since, 1) for role, since in plane.controller.risk_since.items()},
        "counters": dict(plane.counters.values),
    }


def engine_status(
    plane: ControlPlane, engine: Engine, health: Mapping[EngineId, bool | None], *, now: float
) -> dict[str, Any]:
    """Return one engine's place in the control plane: state, holds with age and next probe, streaks, last events."""
    ejection = engine.ejection
    return {
        "id": engine.id,
        "url": engine.url,
        "role": engine.role,
        "state": engine_state(engine, now=now),
        "healthy": health.get(engine.id),
        "generation": engine.generation,
        "inflight": engine.resident,
        "ejection": ejection
        and {
            "cause": ejection.cause,
            "age_s": round(now - ejection.since, 1),
            "detail": ejection.detail,
            "attempts": ejection.attempts,
            "last_step": ejection.last_step,
            "last_reason": ejection.last_reason,
            "next_attempt_s": round(max(0.0, ejection.retry_at - now), 1),
        },
        "holds": [_hold_status(plane, engine, hold, now=now) for hold in engine.holds.values()],
        "probes": [_probe_status(kind, probe, now=now) for kind, probe in engine.probes.items()],
        "apart_from": _apart_from(plane, engine, now=now),
        "streaks": dict(engine.streaks.by_class),
        "leg_streaks": {f"{c}/{leg}": count for (c, leg), count in engine.streaks.by_leg.items()},
        "interval": {"succeeded": engine.interval.succeeded, "failed": engine.interval.failed},
        "history": [{"age_s": round(now - r.at, 1), "what": r.what, "why": r.why} for r in engine.history],
    }


def _probe_status(kind: ProbeKind, probe: PendingProbe, *, now: float) -> dict[str, Any]:
    """Return what a probe is for, whether it runs now, and else when it runs next."""
    return {
        "kind": kind,
        "cause": probe.cause,
        "partner": probe.partner,
        "running": probe.running,
        "inconclusive": probe.attempts,
        "next_s": None if probe.running else round(max(0.0, probe.due_at - now), 1),
    }


def _apart_from(plane: ControlPlane, engine: Engine, *, now: float) -> list[dict[str, Any]]:
    """Return the engines that placement keeps apart from `engine`, since when, and when the pair is probed again."""
    return [
        {
            "engine": pair.decode if engine.id == pair.prefill else pair.prefill,
            "age_s": round(now - apart.since, 1),
            "next_probe_s": None if apart.due_at == inf else round(max(0.0, apart.due_at - now), 1),
        }
        for pair, apart in plane.fleet.pairs.apart.items()
        if engine.id in pair
    ]


def engine_state(engine: Engine, *, now: float) -> str:
    """Return `ejected`, the kind of the hold that keeps it out, or `eligible`."""
    if engine.ejection is not None:
        return "ejected"
    standing = [kind for kind in HoldKind if kind in engine.holds and engine.holds[kind].until > now]
    return standing[0] if standing else "eligible"


def _hold_status(plane: ControlPlane, engine: Engine, hold: Hold, *, now: float) -> dict[str, Any]:
    next_at = plane.fleet.probing.next_at(engine, ProbeKind.INFERENCE)
    return {
        "kind": hold.kind,
        "age_s": round(now - hold.since, 1),
        "reason": hold.reason,
        "actor": hold.actor,
        "remaining_s": None if hold.until == inf else round(max(0.0, hold.until - now), 1),
        "settled": hold.settled,
        "inconclusive_probes": hold.attempts,
        "next_probe_s": None if next_at is None else round(max(0.0, next_at - now), 1),
    }
