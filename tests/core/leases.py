"""Leases and looks at them, for tests of tenure and takeover."""

from __future__ import annotations

from typing import Any

from narwhal.config import HaSection
from narwhal.core.lease import LeaseObservation, LeaseRecord, ProcessIdentity, Release
from narwhal.core.vocabulary import FencingToken, RouterId

A, B, C = RouterId("router-a"), RouterId("router-b"), RouterId("router-c")
EPOCH = "epoch-1"


def make_ha(**settings: Any) -> HaSection:
    """The defaults (T 2.0, r 0.4, o 0.3, m 0.2, e 0.005), with some of them changed."""
    return HaSection(**settings)


def make_lease(
    router: RouterId = A, *, token: int = 7, ttl_s: float = 2.0, incarnation: str | None = None
) -> LeaseRecord:
    """One term of `router`."""
    return LeaseRecord(
        router=router,
        incarnation=incarnation or f"{router}-1",
        token=FencingToken(token),
        ttl_ms=round(ttl_s * 1000),
        url=f"http://{router}:8000",
        admin_url=f"http://{router}:8100",
        engine_set="sha256:0",
        schema=1,
        version="test",
        process=ProcessIdentity(host="h", boot_id="b", pid_namespace="n", pid=1, start_ticks=1),
    )


def held_by(record: LeaseRecord, *, left_s: float, epoch: str | None = EPOCH) -> LeaseObservation:
    """What a look finds while `record` has `left_s` to live."""
    return LeaseObservation(
        record=record,
        pttl_ms=round(left_s * 1000),
        token=record.token,
        epoch=epoch,
        claim=None,
        release=None,
        handoff=None,
    )


def nobody(*, token: int = 7, epoch: str | None = EPOCH, release: Release | None = None) -> LeaseObservation:
    """What a look finds while the lease is missing; `token` is the highest ever granted."""
    return LeaseObservation(
        record=None,
        pttl_ms=0,
        token=FencingToken(token),
        epoch=epoch,
        claim=None,
        release=release,
        handoff=None,
    )


def released(by: RouterId = A, *, token: int = 7, to: RouterId | None = None) -> Release:
    """The farewell of a term."""
    return Release(by, f"{by}-1", FencingToken(token), to)
