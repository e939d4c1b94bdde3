"""Tenure and takeover over a tiny store, against an adversary: at no instant do two routers hold.

Three routers follow the protocol. The adversary owns time, delivers every message as late as it likes, loses requests
and answers, delivers lost requests later after all, stops and restarts routers, flushes the store, deletes the lease
key by hand, and gives every router a clock that is wrong by up to the configured error. A router that is not scheduled
is a router that is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from narwhal.config import HaSection
from narwhal.core.lease import (
    DataLost,
    Granted,
    LeaseObservation,
    LeaseRecord,
    Lost,
    Occupied,
    Release,
    Renewed,
)
from narwhal.core.takeover import Attempt, Takeover
from narwhal.core.tenure import NO_TOKEN, Tenure
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId
from tests.core.leases import A, B, C, make_ha, make_lease

HA = make_ha(clock_error=0.01, renew_every_s=0.4)
T_S = HA.lease_ttl_s


class Store:
    """What the scripts promise, on true time."""

    def __init__(self) -> None:
        self.lease: LeaseRecord | None = None
        self.expires_at = 0.0
        self.token = NO_TOKEN
        self.epoch: str | None = None
        self.epochs = 0
        self.release_: Release | None = None
        self.granted: list[FencingToken] = []

    def standing(self, now: float) -> LeaseRecord | None:
        return self.lease if self.lease is not None and now < self.expires_at else None

    def flush(self) -> None:
        self.lease, self.token, self.epoch, self.release_ = None, NO_TOKEN, None, None

    def observe(self, now: float) -> LeaseObservation:
        record = self.standing(now)
        left_ms = int((self.expires_at - now) * 1000) if record is not None else 0
        return LeaseObservation(record, left_ms, self.token, self.epoch, None, self.release_, None)

    def acquire(self, request: Acquire, now: float) -> Granted | Occupied | DataLost:
        record = self.standing(now)
        if record is not None:
            if (record.router, record.incarnation) != (request.candidate.router, request.candidate.incarnation):
                return Occupied(record, 0)
            self.expires_at = now + T_S
            return Granted(record, fresh=False)
        if request.after != self.token or request.epoch not in (None, self.epoch):
            return DataLost()
        if self.epoch is None:
            self.epochs += 1
            self.epoch = f"epoch-{self.epochs}"
        self.token = FencingToken(max(self.token, request.floor, *self.granted, 0) + 1)
        self.granted.append(self.token)
        self.lease = request.candidate.with_token(self.token)
        self.expires_at = now + T_S
        return Granted(self.lease, fresh=True)

    def renew(self, record: LeaseRecord, now: float) -> Renewed | Lost:
        standing = self.standing(now)
        if standing != record:
            return Lost(standing)
        self.expires_at = now + T_S
        return Renewed(None)

    def release(self, record: LeaseRecord, now: float) -> bool:
        if self.standing(now) != record:
            return False
        self.lease = None
        self.release_ = Release(record.router, record.incarnation, record.token, None)
        return True


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take the lease, if nothing happened since the look that said so."""

    candidate: LeaseRecord
    floor: FencingToken
    epoch: str | None
    after: FencingToken


@dataclass(frozen=True, slots=True)
class Observe:
    """Look."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Extend this term."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Release this term, which was fenced."""

    record: LeaseRecord


Request = Acquire | Observe | Renew | GiveUp
Answer = LeaseObservation | Granted | Occupied | DataLost | Renewed | Lost | bool


@dataclass(slots=True)
class Call:
    """A request on its way; `answer` once the store has carried it out."""

    request: Request
    sent_at: float
    answer: Answer | None = None


@dataclass(slots=True)
class Router:
    """One router as its drivers move it: one call at a time."""

    id: RouterId
    rate: float
    offset: float
    starts: int = 1
    tenure: Tenure = field(default_factory=lambda: Tenure(margin_s=HA.margin_s, clock_error=HA.clock_error))
    takeover: Takeover = field(init=False)
    call: Call | None = None
    next: Request | None = None
    floor: FencingToken = NO_TOKEN
    retake_before: float | None = None

    def __post_init__(self) -> None:
        self.follow()

    def clock(self, now: float) -> float:
        return self.offset + self.rate * now

    @property
    def incarnation(self) -> str:
        return f"{self.id}-{self.starts}"

    def candidate(self) -> LeaseRecord:
        return make_lease(self.id, token=0, incarnation=self.incarnation)

    def follow(self) -> None:
        self.takeover = Takeover(self.id, HA, incarnation=self.incarnation, held=self.tenure.token)

    def fence(self, reason: str) -> None:
        self.tenure.fence(reason)
        self.follow()

    def wish(self, now: float) -> Request:
        """What the drivers would send next."""
        if self.next is not None:
            wished, self.next = self.next, None
            return wished
        record = self.tenure.record
        if record is not None and not self.tenure.held(self.clock(now)):
            self.fence("deadline")
        if record is not None and self.tenure.record is not None:
            return Renew(record)
        return Observe()

    def take(self, call: Call, now: float) -> None:
        """Let the drivers take in an answer."""
        clock = self.clock(now)
        match call.answer:
            case LeaseObservation():
                self._looked(call.answer, call.sent_at, clock)
            case Granted(record=record):
                self._granted(record, call.sent_at, clock)
            case Renewed():
                self.tenure.renewed(sent_at=call.sent_at, now=clock)
            case Lost(holder=holder):
                self.retake_before = self.tenure.valid_until if self.tenure.held(clock) and holder is None else None
                self.fence("lost")
            case _:
                self.retake_before = None

    def _granted(self, record: LeaseRecord, sent_at: float, clock: float) -> None:
        before, self.retake_before = self.retake_before, None
        if record.token <= self.tenure.token:
            return
        self.floor = FencingToken(max(self.floor, record.token))
        self.tenure.granted(record, sent_at=sent_at)
        if before is not None and clock >= before:
            self.fence("taken again too late")
            self.next = GiveUp(record)

    def _looked(self, seen: LeaseObservation, sent_at: float, clock: float) -> None:
        self.floor = FencingToken(max(self.floor, seen.token))
        if self.retake_before is not None:
            if seen.record is None and seen.token <= self.tenure.token:
                self.next = Acquire(self.candidate(), max(self.floor, self.tenure.token), seen.epoch, seen.token)
            else:
                self.retake_before = None
            return
        decision = self.takeover.decide(seen, sent_at=sent_at, now=clock, fit=True)
        if isinstance(decision, Attempt):
            self.next = Acquire(self.candidate(), self.floor, decision.epoch, decision.after)


names = st.sampled_from([A, B, C])
STEPS_S = (0.001, 0.01, 0.05, 0.1, 0.19, 0.4, 0.8, 1.2, 1.7, 2.0, 2.2)


class LeaseMachine(RuleBasedStateMachine):
    """Any schedule."""

    ha: ClassVar[HaSection] = HA

    @initialize(rates=st.lists(st.sampled_from([0.99, 1.0, 1.01]), min_size=3, max_size=3))
    def start(self, rates: list[float]) -> None:
        self.now = 10.0
        self.store = Store()
        self.flushed_at = -100.0
        self.routers = {
            name: Router(name, rate, offset)
            for name, rate, offset in zip((A, B, C), rates, (0.0, 500.0, 9000.0), strict=True)
        }
        self.strays: list[Request] = []

    @rule(seconds=st.sampled_from(STEPS_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=names)
    def a_router_sends(self, name: RouterId) -> None:
        router = self.routers[name]
        if router.call is None:
            clock = router.clock(self.now)
            router.call = Call(router.wish(self.now), clock)

    @rule(name=names)
    def the_store_answers(self, name: RouterId) -> None:
        call = self.routers[name].call
        if call is not None and call.answer is None:
            call.answer = self.carry_out(call.request)

    @rule(name=names)
    def an_answer_arrives(self, name: RouterId) -> None:
        router = self.routers[name]
        if router.call is not None and router.call.answer is not None:
            call, router.call = router.call, None
            router.take(call, self.now)

    @rule(name=names, seconds=st.sampled_from([0.0, 0.001, 0.05]))
    def a_router_has_a_good_moment(self, name: RouterId, seconds: float) -> None:
        """One whole exchange, so that schedules come to something."""
        for _ in range(2):
            self.a_router_sends(name)
            self.the_store_answers(name)
            self.now += seconds
            self.an_answer_arrives(name)

    @rule(name=names, later=st.booleans())
    def a_call_is_lost(self, name: RouterId, later: bool) -> None:
        """The router gives up on it; the request may still reach the store some day."""
        router = self.routers[name]
        if router.call is not None:
            if later and router.call.answer is None:
                self.strays.append(router.call.request)
            router.call = None
            router.retake_before = None

    @precondition(lambda self: self.strays)
    @rule(data=st.data())
    def a_stray_request_arrives(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.strays) - 1))
        self.carry_out(self.strays.pop(index))

    @rule(name=names)
    def a_router_stops_by_itself(self, name: RouterId) -> None:
        router = self.routers[name]
        record = router.tenure.record
        if record is not None and router.call is None:
            router.fence("stopping")
            router.next = GiveUp(record)

    @rule(name=names)
    def a_router_is_killed_and_restarted(self, name: RouterId) -> None:
        old = self.routers[name]
        self.routers[name] = Router(name, old.rate, old.offset, starts=old.starts + 1, floor=old.floor)

    @rule(looker=names, looked_at=names)
    def a_router_looks_at_another(self, looker: RouterId, looked_at: RouterId) -> None:
        other = self.routers[looked_at]
        held = other.tenure.held(other.clock(self.now))
        self.routers[looker].takeover.saw_peer(PeerSign.READY if held else PeerSign.REFUSED, other.tenure.token)

    @rule()
    def an_operator_deletes_the_lease(self) -> None:
        self.store.lease = None

    @precondition(lambda self: self.now >= self.flushed_at + 3 * T_S)
    @rule()
    def the_store_loses_its_data(self) -> None:
        """Not twice within a few TTLs: a term that came and went between two flushes leaves no trace for a look."""
        self.flushed_at = self.now
        self.store.flush()

    def carry_out(self, request: Request) -> Answer:
        match request:
            case Observe():
                return self.store.observe(self.now)
            case Acquire():
                return self.store.acquire(request, self.now)
            case Renew():
                return self.store.renew(request.record, self.now)
            case GiveUp():
                return self.store.release(request.record, self.now)

    @invariant()
    def at_most_one_router_holds(self) -> None:
        if hasattr(self, "routers"):
            holding = [r.id for r in self.routers.values() if r.tenure.held(r.clock(self.now))]
            assert len(holding) <= 1, holding

    @invariant()
    def tokens_only_grow(self) -> None:
        if hasattr(self, "store"):
            assert self.store.granted == sorted(set(self.store.granted))


LeaseMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestLease = LeaseMachine.TestCase
