"""Routers that follow the lease protocol, over a tiny store, in the hands of an adversary.

The adversary owns time, delivers every message as late as it likes, loses requests and answers, delivers lost requests
later after all, stops and restarts routers, makes the store lose its data, deletes the lease key by hand, and gives
every router a clock that is wrong by up to the configured error. A router that is not scheduled is one that is stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from narwhal.core.lease import DataLost, Granted, LeaseObservation, LeaseRecord, Lost, Occupied, Release, Renewed
from narwhal.core.takeover import Attempt, Takeover
from narwhal.core.tenure import NO_TOKEN, Tenure
from narwhal.core.vocabulary import FencingToken, PeerSign, RouterId
from tests.core.leases import A, B, C, make_ha, make_lease

HA = make_ha(clock_error=0.01)
T_S = HA.lease_ttl_s
NAMES = (A, B, C)
RATES = (1 - HA.clock_error, 1.0, 1 + HA.clock_error)


@dataclass(frozen=True, slots=True)
class Protocol:
    """The rules that the routers follow; a test may break one to see that the adversary notices."""

    takeover: type[Takeover] = Takeover
    tenure: type[Tenure] = Tenure
    counts_from_reply: bool = False
    compares_token: bool = True


@dataclass(frozen=True, slots=True)
class Observe:
    """Look."""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take the lease, if nothing happened since the look that said so."""

    candidate: LeaseRecord
    floor: FencingToken
    epoch: str | None
    after: FencingToken


@dataclass(frozen=True, slots=True)
class Renew:
    """Extend this term."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Release this term, which was fenced."""

    record: LeaseRecord


Request = Observe | Acquire | Renew | GiveUp
Answer = LeaseObservation | Granted | Occupied | DataLost | Renewed | Lost | bool


class Store:
    """What the scripts promise, on true time."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._expires_at = 0.0
        self._epochs = 0
        self.lease: LeaseRecord | None = None
        self.token = NO_TOKEN
        self.epoch: str | None = None
        self.farewell: Release | None = None
        self.granted: list[FencingToken] = []

    def carry_out(self, request: Request, now: float) -> Answer:
        """Do what `request` says at the true time `now`."""
        if self.lease is not None and now >= self._expires_at:
            self.lease = None
        match request:
            case Observe():
                left_ms = int((self._expires_at - now) * 1000) if self.lease is not None else 0
                return LeaseObservation(self.lease, left_ms, self.token, self.epoch, None, self.farewell, None)
            case Acquire():
                return self._acquire(request, now)
            case Renew(record=record):
                if self.lease != record:
                    return Lost(self.lease)
                self._expires_at = now + T_S
                return Renewed(None)
            case GiveUp(record=record):
                if self.lease != record:
                    return False
                self.lease = None
                self.farewell = Release(record.router, record.incarnation, record.token, None)
                return True

    def lose_data(self) -> None:
        """Forget everything, as FLUSHALL or a restart without persistence does."""
        self.lease, self.token, self.epoch, self.farewell = None, NO_TOKEN, None, None

    def _acquire(self, request: Acquire, now: float) -> Granted | Occupied | DataLost:
        if self.lease is not None:
            if self.lease.incarnation != request.candidate.incarnation:
                return Occupied(self.lease, 0)
            self._expires_at = now + T_S
            return Granted(self.lease, fresh=False)
        if request.epoch not in (None, self.epoch) or (self._protocol.compares_token and request.after != self.token):
            return DataLost()
        if self.epoch is None:
            self._epochs += 1
            self.epoch = f"epoch-{self._epochs}"
        self.token = FencingToken(max(self.token, request.floor, *self.granted, 0) + 1)
        self.granted.append(self.token)
        self.lease = request.candidate.with_token(self.token)
        self._expires_at = now + T_S
        return Granted(self.lease, fresh=True)


@dataclass(slots=True)
class Call:
    """A request on its way; `answer` once the store has carried it out."""

    request: Request
    sent_at: float
    answer: Answer | None = None


@dataclass(slots=True)
class Router:
    """One router as its drivers move it: one call at a time, on a clock of its own."""

    id: RouterId
    rate: float
    offset: float
    protocol: Protocol
    starts: int = 1
    floor: FencingToken = NO_TOKEN
    call: Call | None = None
    next: Request | None = None
    retake_before: float | None = None
    tenure: Tenure = field(init=False)
    takeover: Takeover = field(init=False)

    def __post_init__(self) -> None:
        self.tenure = self.protocol.tenure(margin_s=HA.margin_s, clock_error=HA.clock_error)
        self._follow()

    def clock(self, now: float) -> float:
        return self.offset + self.rate * now

    def holds(self, now: float) -> bool:
        """Whether this router would admit a request now."""
        return self.tenure.held(self.clock(now))

    @property
    def candidate(self) -> LeaseRecord:
        return make_lease(self.id, token=0, incarnation=f"{self.id}-{self.starts}")

    def wish(self, now: float) -> Request:
        """What the drivers would send next."""
        if self.next is not None:
            wished, self.next = self.next, None
            return wished
        if self.tenure.record is not None and not self.holds(now):
            self.fence("the local lease deadline has passed")
        record = self.tenure.record
        return Renew(record) if record is not None else Observe()

    def fence(self, reason: str) -> None:
        self.tenure.fence(reason)
        self._follow()

    def take(self, call: Call, now: float) -> None:
        """Let the drivers take in an answer."""
        clock = self.clock(now)
        sent_at = clock if self.protocol.counts_from_reply else call.sent_at
        match call.answer:
            case LeaseObservation():
                self._looked(call.answer, sent_at, clock)
            case Granted(record=record):
                self._granted(record, sent_at, clock)
            case Renewed():
                self.tenure.renewed(sent_at=sent_at, now=clock)
            case Lost(holder=holder):
                self.retake_before = self.tenure.valid_until if self.tenure.held(clock) and holder is None else None
                self.fence("lost")
            case _:
                self.retake_before = None

    def _follow(self) -> None:
        self.takeover = self.protocol.takeover(
            self.id, HA, incarnation=self.candidate.incarnation, held=self.tenure.token
        )

    def _granted(self, record: LeaseRecord, sent_at: float, clock: float) -> None:
        before, self.retake_before = self.retake_before, None
        if record.token <= self.tenure.token:
            return
        self.floor = record.token
        self.tenure.granted(record, sent_at=sent_at)
        if before is not None and clock >= before:
            self.fence("taken again too late")
            self.next = GiveUp(record)

    def _looked(self, seen: LeaseObservation, sent_at: float, clock: float) -> None:
        self.floor = FencingToken(max(self.floor, seen.token, self.tenure.token))
        if self.retake_before is None:
            decision = self.takeover.decide(seen, sent_at=sent_at, now=clock, fit=True)
            if isinstance(decision, Attempt):
                self.next = Acquire(self.candidate, self.floor, decision.epoch, decision.after)
        elif seen.record is None and seen.token <= self.tenure.token:
            self.next = Acquire(self.candidate, self.floor, seen.epoch, seen.token)
        else:
            self.retake_before = None


class World:
    """Three routers, one store, and everything that the adversary may do to them."""

    def __init__(self, rates: Sequence[float], protocol: Protocol | None = None) -> None:
        self._protocol = protocol or Protocol()
        self.now = 10.0
        self.store = Store(self._protocol)
        self.data_lost_at = -100.0
        self.routers = {
            name: Router(name, rate, offset, self._protocol)
            for name, rate, offset in zip(NAMES, rates, (0.0, 500.0, 9000.0), strict=True)
        }
        self.strays: list[Request] = []

    @property
    def holding(self) -> list[RouterId]:
        return [router.id for router in self.routers.values() if router.holds(self.now)]

    def send(self, name: RouterId) -> None:
        router = self.routers[name]
        if router.call is None:
            clock = router.clock(self.now)
            router.call = Call(router.wish(self.now), clock)

    def answer(self, name: RouterId) -> None:
        call = self.routers[name].call
        if call is not None and call.answer is None:
            call.answer = self.store.carry_out(call.request, self.now)

    def deliver(self, name: RouterId) -> None:
        router = self.routers[name]
        if router.call is not None and router.call.answer is not None:
            call, router.call = router.call, None
            router.take(call, self.now)

    def exchange(self, name: RouterId, *, round_trip_s: float = 0.0) -> None:
        """One whole call, there and back."""
        self.send(name)
        self.answer(name)
        self.now += round_trip_s
        self.deliver(name)

    def attend(self, name: RouterId, seconds: float) -> None:
        """Let time pass for everybody, in which this one router is never stopped."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.06
            self.exchange(name)

    def lose(self, name: RouterId) -> None:
        """The router gives up on its call; a request that the store has not seen may still reach it some day."""
        router = self.routers[name]
        if router.call is not None:
            if router.call.answer is None:
                self.strays.append(router.call.request)
            router.call = None
            router.retake_before = None

    def let_stray_arrive(self, index: int) -> None:
        self.store.carry_out(self.strays.pop(index), self.now)

    def stop(self, name: RouterId) -> None:
        """The planned end of a term: fence, then release."""
        router = self.routers[name]
        record = router.tenure.record
        if record is not None and router.call is None:
            router.fence("stopping")
            router.next = GiveUp(record)

    def restart(self, name: RouterId) -> None:
        """Kill the process; another one with the same name starts."""
        old = self.routers[name]
        self.routers[name] = Router(name, old.rate, old.offset, self._protocol, old.starts + 1, old.floor)

    def look_at_peer(self, name: RouterId, peer: RouterId) -> None:
        other = self.routers[peer]
        sign = PeerSign.READY if other.holds(self.now) else PeerSign.REFUSED
        self.routers[name].takeover.saw_peer(sign, other.tenure.token)

    def lose_data(self) -> None:
        """Not twice within a few TTLs: a term that came and went between two losses leaves no trace for a look."""
        if self.now >= self.data_lost_at + 3 * T_S:
            self.data_lost_at = self.now
            self.store.lose_data()

    def bring_up(self) -> None:
        """Let router A wait out the empty store and become active while B follows."""
        while not self.routers[A].holds(self.now):
            self.now += 0.15
            self.exchange(A)
        self.exchange(B)
