"""The drill `kill-active`: a pair under load loses its active router to SIGKILL, and what happened is proven.

Before the kill one engine is drained by an operator and one is ejected because its health fails; the successor must
have both from the handoff. Source: ha.md, 2.13 and D1.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from narwhal.core.lease import LeaseRecord
from narwhal.core.vocabulary import HoldKind
from narwhal.demo.clock import lease_clock
from narwhal.demo.evidence import (
    bounded_by_death,
    first_admission_after,
    not_carried,
    overlap_ms,
    read_admissions,
    ready_overlap_ms,
    terms,
)
from narwhal.demo.fleet import DemoFailed, Fleet, Say
from narwhal.demo.load import Death, Load, Outcome
from narwhal.demo.pilot import Pilot
from narwhal.demo.plan import PlannedEngine, PlannedRouter
from narwhal.demo.prober import Prober, Sample
from narwhal.errors import NarwhalError
from narwhal.ha.admin_client import AdminClient
from narwhal.ha.kill import active_process

DRAINED: Final = "prefill-2"
EJECTED: Final = "decode-2"
FAULT: Final = {"kind": "status", "leg": "health", "status": 500}
WARM_OK_MIN: Final = 20
AFTER_OK_MIN: Final = 40
STEP_TIMEOUT_S: Final = 30.0
LOAD_S: Final = 2.0
WORKERS: Final = 2
LATE_MS: Final = 500.0


@dataclass(slots=True)
class Findings:
    """What the drill saw; `problems` is empty when everything held."""

    token_before: int = 0
    token_after: int = 0
    takeover_ms: float | None = None
    ready_ms: float | None = None
    lost_state: list[str] = field(default_factory=list)
    admission_overlap_ms: float = 0.0
    ready_overlap_ms: float = 0.0
    ok: int = 0
    failed_in_flight: int = 0
    failed_other: int = 0
    lease_ttl_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def overlap_ms(self) -> float:
        """The longer of the overlaps that the two witnesses saw."""
        return max(self.admission_overlap_ms, self.ready_overlap_ms)

    @property
    def late(self) -> bool:
        """Whether the takeover took longer than a lease and a half second."""
        return self.takeover_ms is not None and self.takeover_ms > self.lease_ttl_s * 1000 + LATE_MS

    def problems(self) -> list[str]:
        """Return why the drill failed, one reason a line."""
        found = []
        if self.token_after <= self.token_before:
            found.append(f"the fencing token did not rise: {self.token_before} before, {self.token_after} after")
        if self.takeover_ms is None:
            found.append("the successor admitted nothing")
        if self.overlap_ms > 0:
            found.append(f"two routers admitted at once for {self.overlap_ms:.3f} ms")
        if self.failed_other:
            found.append(f"{self.failed_other} requests failed that were not in flight on the killed router")
        found += [f"state was not carried: {lost}" for lost in self.lost_state]
        return found

    def document(self) -> dict[str, Any]:
        """Return the result as the one JSON object that the drill prints."""
        problems = self.problems()
        return {
            "drill": "kill-active",
            "passed": not problems,
            "problems": problems,
            "takeover_ms": _rounded(self.takeover_ms),
            "takeover_within_ttl_plus_500_ms": self.takeover_ms is not None and not self.late,
            "fencing_token_before": self.token_before,
            "fencing_token_after": self.token_after,
            "requests_ok": self.ok,
            "requests_failed_in_flight": self.failed_in_flight,
            "requests_failed_other": self.failed_other,
            "overlap_ms": _rounded(self.overlap_ms),
            "state_carried": not self.lost_state,
            "lease_ttl_s": self.lease_ttl_s,
            "ready_ms": _rounded(self.ready_ms),
            **self.detail,
        }


class KillActiveDrill:
    """One run over a fleet that is already whole."""

    def __init__(self, fleet: Fleet, *, say: Say) -> None:
        self._fleet = fleet
        self._say = say
        self._routers = {router.id: router for router in fleet.plan.routers}
        self._engines = {engine.id: engine for engine in fleet.plan.engines}
        self._prober = Prober({name: router.url for name, router in self._routers.items()})
        self._load = Load(self._prober, model=fleet.plan.models[0])
        self._findings = Findings(lease_ttl_s=fleet.options.lease_ttl_s)
        self._token = os.environ.get("NARWHAL_ADMIN_TOKEN") or None

    async def run(self) -> Findings:
        """Run every step and return what was found. Raises NarwhalError when the drill itself cannot go on."""
        active, standby = await self._pair()
        await self._mark_engines(active, standby)
        before = await self._marked(active)
        marked_at = lease_clock()
        probing = asyncio.create_task(self._prober.run(), name="prober")
        loading = asyncio.create_task(self._load.run(workers=WORKERS), name="load")
        try:
            await self._loaded(WARM_OK_MIN, router=None, watch=(probing, loading))
            record = await self._holder()
            legs_before = await self._legs()
            death = await self._kill(record)
            pilot = await self._fly(record.router)
            successor = await self._successor(record)
            await self._loaded(AFTER_OK_MIN, router=successor.id, watch=(probing, loading))
            after = await self._marked(successor)
            elapsed_s = lease_clock() - marked_at
            legs_after = await self._legs()
            self._load.stop()
            await loading
        finally:
            for task in (loading, probing):
                task.cancel()
            await asyncio.gather(loading, probing, return_exceptions=True)
        self._judge_state(before, after, elapsed_s=elapsed_s, legs=(legs_before, legs_after))
        self._judge_admissions(death)
        self._tell(successor, death, pilot)
        await self._fleet.wait_until_whole()
        self._findings.detail["whole_again_ms"] = _rounded((lease_clock() - death.killed_at) * 1000)
        self._say(f"{death.router} is back as standby")
        return self._findings

    async def _pair(self) -> tuple[PlannedRouter, PlannedRouter]:
        active = await self._fleet.wait_until_whole()
        standby = next(router for router in self._routers.values() if router.id != active.id)
        self._say(f"{active.id} is active, {standby.id} stands by")
        return active, standby

    async def _holder(self) -> LeaseRecord:
        record = (await self._fleet.stores.lease.observe()).record
        if record is None:
            raise DemoFailed("nobody holds the lease just before the kill; the pair did not hold under load")
        self._findings.token_before = record.token
        return record

    async def _mark_engines(self, active: PlannedRouter, standby: PlannedRouter) -> None:
        """Drain one engine and have one ejected, and wait until the standby has followed both."""
        async with AdminClient(active.admin_url, token=self._token) as admin:
            await admin.act("drain", DRAINED, actor="drill", reason="must survive the takeover")
        await self._break_health(self._engines[EJECTED])
        self._say(f"{DRAINED} is drained; {EJECTED} fails its health checks until it is ejected")
        for router in (active, standby):
            await self._until(
                lambda router=router: self._has_marks(router),  # type: ignore[misc]
                f"{router.id} shows {DRAINED} drained and {EJECTED} ejected",
            )

    async def _break_health(self, engine: PlannedEngine) -> None:
        assert engine.admin_url is not None, "the drill runs with stub engines"
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.post(f"{engine.admin_url}/stub/faults", json=FAULT) as answer,
        ):
            if answer.status != 200:
                raise DemoFailed(f"{engine.id} refused its fault: {await answer.text()}")

    async def _marked(self, router: PlannedRouter) -> dict[str, dict[str, Any]]:
        async with AdminClient(router.admin_url, token=self._token) as admin:
            return {engine["id"]: engine for engine in await admin.engines() if engine["id"] in (DRAINED, EJECTED)}

    async def _has_marks(self, router: PlannedRouter) -> bool:
        engines = await self._marked(router)
        drained = any(hold["kind"] == HoldKind.OPERATOR_DRAIN for hold in engines[DRAINED]["holds"])
        return drained and engines[EJECTED]["ejection"] is not None

    async def _legs(self) -> int:
        """Return how many legs the marked engines have ever got."""
        total = 0
        async with aiohttp.ClientSession(trust_env=False) as session:
            for name in (DRAINED, EJECTED):
                async with session.get(f"{self._engines[name].admin_url}/stub/state") as answer:
                    requests = (await answer.json())["counters"]["requests"]
                    total += requests.get("prefill", 0) + requests.get("decode", 0)
        return total

    async def _kill(self, record: LeaseRecord) -> Death:
        """Send SIGKILL to exactly the process that the lease names, and return once it is gone."""
        child = self._fleet.children[record.router]
        with active_process(record, lease_left_ms=0) as holder:
            if holder.pid != child.pid:
                raise DemoFailed(f"the lease names process {holder.pid}, but {record.router} runs as {child.pid}")
            death = Death(record.router, lease_clock())
            self._load.death = death
            holder.send(signal.SIGKILL)
            await _gone(holder.handle)
            death.gone_at = lease_clock()
        self._say(f"killed {record.router} (process {holder.pid}, token {record.token})")
        return death

    async def _fly(self, killed: str) -> Pilot:
        """Send one request after the other to the router that is left, until it serves one."""
        left = next(router for name, router in self._routers.items() if name != killed)
        pilot = Pilot(left.url, model=self._fleet.plan.models[0])
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await pilot.run()
        except TimeoutError as error:
            raise DemoFailed(f"{left.id} served nothing in {STEP_TIMEOUT_S:g} s after the kill") from error
        return pilot

    async def _successor(self, record: LeaseRecord) -> PlannedRouter:
        async def risen() -> bool:
            seen = (await self._fleet.stores.lease.observe()).record
            if seen is None or seen.token <= record.token:
                return False
            self._findings.token_after = seen.token
            self._successor_id = seen.router
            return True

        await self._until(risen, "another term begins")
        successor = self._routers[self._successor_id]
        self._say(f"{successor.id} holds the lease with token {self._findings.token_after}")
        return successor

    def _judge_state(
        self, before: Mapping[str, Any], after: Mapping[str, Any], *, elapsed_s: float, legs: tuple[int, int]
    ) -> None:
        lost = not_carried(before, after, elapsed_s=elapsed_s)
        if legs[1] > legs[0]:
            lost.append(f"{DRAINED} and {EJECTED} got {legs[1] - legs[0]} legs although they were out")
        self._findings.lost_state = lost
        self._findings.detail["engines_out"] = {name: after[name]["state"] for name in sorted(after)}

    def _judge_admissions(self, death: Death) -> None:
        found = self._findings
        admissions = read_admissions({name: self._fleet.children[name].log for name in self._routers})
        attempts = [attempt for request in self._load.requests for attempt in request.attempts]
        known = terms(admissions)
        bounded = [bounded_by_death(t, attempts, death) if t.token == found.token_before else t for t in known]
        found.admission_overlap_ms = overlap_ms(bounded)
        found.ready_overlap_ms = ready_overlap_ms(self._prober.samples)
        first = first_admission_after(admissions, token=found.token_before, at=death.killed_at)
        found.takeover_ms = None if first is None else (first.at - death.killed_at) * 1000
        ready = self._first_ready(after=death.killed_at, token=found.token_before)
        found.ready_ms = None if ready is None else (ready.received_at - death.killed_at) * 1000
        found.ok = self._load.count(Outcome.OK)
        found.failed_in_flight = self._load.count(Outcome.FAILED_IN_FLIGHT)
        found.failed_other = self._load.count(Outcome.FAILED_OTHER)
        found.detail["terms"] = [
            {
                "fencing_token": term.token,
                "router": term.router,
                "requests": term.count,
                "first_admission_ms": _rounded((term.first - death.killed_at) * 1000),
                "last_admission_ms": _rounded((term.last - death.killed_at) * 1000),
            }
            for term in bounded
        ]

    def _first_ready(self, *, after: float, token: int) -> Sample | None:
        later = (s for s in self._prober.samples if s.ready and s.sent_at > after and (s.token or 0) > token)
        return min(later, key=lambda sample: sample.received_at, default=None)

    def _tell(self, successor: PlannedRouter, death: Death, pilot: Pilot) -> None:
        requests = self._load.requests
        self._findings.failed_other += len(pilot.surprises)
        failures = [request.detail for request in requests if request.outcome is Outcome.FAILED_OTHER]
        self._findings.detail |= {
            "killed": death.router,
            "successor": successor.id,
            "requests_by_kind": {
                kind: self._load.count(Outcome.OK, kind=kind) for kind in sorted({r.kind for r in requests})
            },
            "requests_retried": sum(len(request.attempts) > 1 for request in requests),
            "requests_refused_not_executed": pilot.refusals,
            "failures_other": [*pilot.surprises, *failures][:10],
            "ready_samples": len(self._prober.samples),
            "gone_ms": _rounded((death.gone_at - death.killed_at) * 1000),
        }

    async def _loaded(self, count: int, *, router: str | None, watch: tuple[asyncio.Task[None], ...]) -> None:
        """Return after two seconds of load in which `router` answered `count` requests; any router if it is None."""
        loop = asyncio.get_running_loop()
        enough_at = loop.time() + LOAD_S

        async def reached() -> bool:
            for task in watch:
                if task.done():
                    task.result()
                    raise DemoFailed(f"{task.get_name()} ended by itself")
            return loop.time() >= enough_at and self._load.count(Outcome.OK, router=router) >= count

        await self._until(reached, f"{count} requests are answered{f' by {router}' if router else ''}")

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Return when `condition` holds. Raises DemoFailed when it does not in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STEP_TIMEOUT_S
        last_error = ""
        while loop.time() < deadline:
            try:
                if await condition():
                    return
            except DemoFailed:
                raise
            except NarwhalError as error:
                last_error = f"; last: {error}"
            await asyncio.sleep(0.02)
        raise DemoFailed(f"not within {STEP_TIMEOUT_S:g} s: {what}{last_error}; the logs are in {self._fleet.folder}")


async def _gone(handle: int) -> None:
    """Return the moment the process behind a pidfd has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
