"""Any sequence of events over the fleet, with a model beside it and a twin that must decide the same."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from narwhal.core.control_plane import ControlPlane
from narwhal.core.events import (
    Decision,
    DrainCancelled,
    DrainOrdered,
    EjectionOrdered,
    FleetEvent,
    GenerationSeen,
    HealthAnswered,
    HealthProbed,
    InferenceProbed,
    LegFailed,
    LegRefused,
    LegReleased,
    LegStarted,
    LegSucceeded,
    LivenessSilent,
    PairFinding,
    ProbeOrdered,
    ReadmissionFailed,
    ReadmissionPassed,
)
from narwhal.core.fleet import Fleet
from narwhal.core.handoff import HandoffDocument, LeasePart, decode_handoff
from narwhal.core.holds import Hold
from narwhal.core.placement import Exhausted, Pair, choose, choose_one
from narwhal.core.vocabulary import (
    EngineId,
    FailureClass,
    FencingToken,
    HoldKind,
    Leg,
    ProbeKind,
    ProbeResult,
    ReadmissionStep,
    Role,
)
from tests.core.fleet_model import FleetModel
from tests.core.fleets import EVIDENCE, entries, make_plane
from tests.core.leases import A

YIELDING = {HoldKind.FAILURE_QUARANTINE, HoldKind.PERFORMANCE_DRIFT}
IDS = [EngineId(entry.id) for entry in entries(prefill=2, decode=3)]
engines = st.sampled_from(IDS)
legs = st.sampled_from(Leg)


class FleetMachine(RuleBasedStateMachine):
    """Every rule is something that can happen. Instants are dyadic, so that ages survive a handover exactly."""

    @initialize(
        prefill=st.integers(1, 2),
        decode=st.integers(1, 3),
        eject_after=st.integers(1, 3),
        quarantine_s=st.sampled_from([None, 4.0, 32.0]),
    )
    def start(self, prefill: int, decode: int, eject_after: int, quarantine_s: float | None) -> None:
        self.now = 128.0
        self.shape = {"prefill": prefill, "decode": decode}
        self.recovery = {"eject_after": eject_after, "failure_quarantine_s": quarantine_s, "liveness_misses": 2}
        self.plane, self.twin = self.new_plane(), self.new_plane()
        self.model = FleetModel({e.id: e.role for e in self.fleet.engines.values()})
        self.orders: list[ProbeOrdered] = []

    def new_plane(self) -> ControlPlane:
        return make_plane(prefill=self.shape["prefill"], decode=self.shape["decode"], recovery=self.recovery)

    @property
    def fleet(self) -> Fleet:
        return self.plane.fleet

    def known(self, engine: EngineId) -> EngineId:
        """The engine itself, or another one if this fleet is too small to have it."""
        return engine if engine in self.fleet.engines else EngineId("d1" if engine.startswith("d") else "p1")

    def happens(self, event: FleetEvent) -> None:
        decisions = self.plane.apply(event, now=self.now)
        assert self.twin.apply(event, now=self.now) == decisions
        self.model.took(event, decisions)
        self.note(decisions)

    def note(self, decisions: list[Decision] | list[ProbeOrdered]) -> None:
        self.orders += [d for d in decisions if isinstance(d, ProbeOrdered)]

    @rule(engine=engines, leg=legs, failure_class=st.sampled_from(EVIDENCE), partner=st.none() | engines)
    def a_leg_fails(self, engine: EngineId, leg: Leg, failure_class: FailureClass, partner: EngineId | None) -> None:
        recorded = self.known(partner) if partner is not None else None
        self.happens(LegFailed(self.known(engine), leg, failure_class, recorded))

    @rule(engine=engines, failure_class=st.sampled_from(EVIDENCE), times=st.integers(2, 4))
    def an_engine_keeps_failing(self, engine: EngineId, failure_class: FailureClass, times: int) -> None:
        leg = Leg(self.fleet.engines[self.known(engine)].role.value)
        for _ in range(times):
            self.happens(LegFailed(self.known(engine), leg, failure_class))

    @rule(engine=engines, leg=legs, partner=st.none() | engines)
    def a_leg_succeeds(self, engine: EngineId, leg: Leg, partner: EngineId | None) -> None:
        recorded = self.known(partner) if partner is not None else None
        self.happens(LegSucceeded(self.known(engine), leg, recorded))

    @rule(prefill=engines, decode=engines, times=st.integers(2, 4))
    def a_pair_keeps_failing(self, prefill: EngineId, decode: EngineId, times: int) -> None:
        for _ in range(times):
            failed = LegFailed(self.known(decode), Leg.DECODE, FailureClass.STREAM, self.known(prefill))
            self.happens(failed)

    @rule(engine=engines, leg=legs)
    def a_request_is_refused(self, engine: EngineId, leg: Leg) -> None:
        self.happens(LegRefused(self.known(engine), leg))

    @rule(engine=engines)
    def health_answers(self, engine: EngineId) -> None:
        self.happens(HealthAnswered(self.known(engine)))

    @rule(engine=engines)
    def a_sweep_is_silent(self, engine: EngineId) -> None:
        self.happens(LivenessSilent(self.known(engine)))

    @rule(engine=engines, leg=legs)
    def a_leg_starts(self, engine: EngineId, leg: Leg) -> None:
        self.happens(LegStarted(self.known(engine), leg))

    @rule(engine=engines, leg=legs)
    def a_leg_ends(self, engine: EngineId, leg: Leg) -> None:
        if self.fleet.engines[self.known(engine)].inflight[leg]:
            self.happens(LegReleased(self.known(engine), leg))

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), result=st.sampled_from(ProbeResult), leg=legs, other=engines)
    def a_probe_ends(self, data: st.DataObject, result: ProbeResult, leg: Leg, other: EngineId) -> None:
        order = self.orders.pop(data.draw(st.integers(0, len(self.orders) - 1)))
        if order.kind is ProbeKind.HEALTH:
            self.happens(HealthProbed(order.engine, result, "", order.number))
            return
        findings = []
        for prefill, decode in self.fleet.probing.plan(order.engine, order.partner, now=self.now):
            failed = data.draw(st.sampled_from([None, leg]))
            conclusive = result is not ProbeResult.INCONCLUSIVE
            findings.append(PairFinding(prefill.id, decode.id, failed_leg=failed, conclusive=conclusive))
        self.happens(InferenceProbed(order.engine, tuple(findings), order.number))

    @rule(engine=engines, result=st.sampled_from(ProbeResult))
    def an_unnumbered_health_verdict_comes(self, engine: EngineId, result: ProbeResult) -> None:
        self.happens(HealthProbed(self.known(engine), result))

    @rule(engine=engines, generation=st.sampled_from(["g1", "g2"]))
    def a_process_is_seen(self, engine: EngineId, generation: str) -> None:
        self.happens(GenerationSeen(self.known(engine), generation))

    @rule(engine=engines)
    def an_operator_drains(self, engine: EngineId) -> None:
        self.happens(DrainOrdered(self.known(engine), "ann", "upgrade"))

    @rule(engine=engines)
    def an_operator_undrains(self, engine: EngineId) -> None:
        self.happens(DrainCancelled(self.known(engine), "ann", "done"))

    @rule(engine=engines)
    def an_operator_ejects(self, engine: EngineId) -> None:
        self.happens(EjectionOrdered(self.known(engine), "ann", "smells"))

    @rule(engine=engines, step=st.sampled_from(ReadmissionStep))
    def a_readmission_fails(self, engine: EngineId, step: ReadmissionStep) -> None:
        self.happens(ReadmissionFailed(self.known(engine), step, "no"))

    @rule(engine=engines, generation=st.sampled_from([None, "g1", "g2"]), clears_drain=st.booleans())
    def a_readmission_passes(self, engine: EngineId, generation: str | None, clears_drain: bool) -> None:
        self.happens(ReadmissionPassed(self.known(engine), generation, clears_drain))

    @rule(engine=engines)
    def the_controller_sees_drift(self, engine: EngineId) -> None:
        for index, plane in enumerate((self.plane, self.twin)):
            hold = Hold(HoldKind.PERFORMANCE_DRIFT, since=self.now, reason="slow")
            decisions = plane.fleet.place(plane.fleet.engines[self.known(engine)], hold, self.now)
            if index == 0:
                self.model.decided(decisions)

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 32.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_pass_lets_time_pass(self) -> None:
        decisions = self.fleet.tick(now=self.now)
        due = self.fleet.probing.due(now=self.now)
        assert self.twin.fleet.tick(now=self.now) == decisions
        assert self.twin.fleet.probing.due(now=self.now) == due
        self.model.decided(decisions)
        self.model.decided(due)
        self.note([*decisions, *due])

    @rule(gap_s=st.sampled_from([0.0, 64.0]))
    def another_router_takes_over(self, gap_s: float) -> None:
        document = self.captured(self.plane)
        self.now += gap_s
        self.plane, self.twin = self.new_plane(), self.new_plane()
        for plane in (self.plane, self.twin):
            plane.restore(document, now=self.now)
        assert self.captured(self.plane) == document
        self.model.handed_over()

    def captured(self, plane: ControlPlane) -> HandoffDocument:
        lease = LeasePart(router=A, incarnation="a-1", token=FencingToken(7))
        return decode_handoff(plane.capture(lease, version=1, now=self.now, wall=0.0).encode())

    @invariant()
    def an_ejected_or_held_engine_is_never_chosen(self) -> None:
        free = {role: [e.id for e in self.fleet.by_role[role] if self.is_free(e.id)] for role in Role}
        for role in Role:
            one = choose_one(self.fleet, role, now=self.now, exclude=frozenset(IDS))
            assert one.id in free[role] if one is not None else not free[role]
        pair = choose(self.fleet, now=self.now)
        if isinstance(pair, Exhausted):
            assert list(pair.roles) == [role for role in Role if not free[role]]
        else:
            assert isinstance(pair, Pair)
            assert pair.prefill.id in free[Role.PREFILL]
            assert pair.decode.id in free[Role.DECODE]

    def is_free(self, engine: EngineId) -> bool:
        """Neither ejected nor held, but for quarantines that have run out."""
        holds = self.fleet.engines[engine].holds
        standing = {kind for kind in self.model.engines[engine].holds if holds[kind].until > self.now}
        return not self.model.engines[engine].ejected and not standing

    @invariant()
    def a_yielding_hold_never_leaves_a_role_empty(self) -> None:
        for role in Role:
            models = [self.model.engines[e.id] for e in self.fleet.by_role[role]]
            if not any(self.is_free(e.id) for e in self.fleet.by_role[role]):
                assert not any(not m.ejected and m.holds <= YIELDING for m in models)

    @invariant()
    def streaks_are_the_failures_since_the_last_clearing_success(self) -> None:
        for name, model in self.model.engines.items():
            assert self.fleet.engines[name].streaks.by_class == model.by_class
            assert self.fleet.engines[name].streaks.by_leg == model.by_leg

    @invariant()
    def every_change_of_state_was_announced(self) -> None:
        for name, model in self.model.engines.items():
            engine = self.fleet.engines[name]
            assert (engine.ejection is not None) == model.ejected
            assert set(engine.holds) == model.holds
            running = {kind: probe.number for kind, probe in engine.probes.items() if probe.running}
            assert running == model.running
            assert {kind for kind, probe in engine.probes.items() if not probe.running} == model.waiting

    @invariant()
    def every_verification_has_a_probe_that_will_end_it(self) -> None:
        for engine in self.fleet.engines.values():
            if HoldKind.INFERENCE_VERIFICATION in engine.holds:
                assert ProbeKind.INFERENCE in engine.probes
            for probe in engine.probes.values():
                assert probe.running or probe.due_at < float("inf")

    @invariant()
    def every_pair_that_is_apart_will_be_probed_or_starts_afresh(self) -> None:
        for pair, apart in self.fleet.pairs.apart.items():
            decode = self.fleet.engines[pair.decode]
            out = decode.ejection is not None or self.fleet.engines[pair.prefill].ejection is not None
            assert apart.due_at < float("inf") or ProbeKind.INFERENCE in decode.probes or out

    @invariant()
    def work_in_flight_adds_up_and_is_never_negative(self) -> None:
        for name, model in self.model.engines.items():
            engine = self.fleet.engines[name]
            assert engine.inflight == model.inflight
            assert min(engine.inflight.values()) >= 0
            assert engine.resident == sum(engine.inflight.values())


FleetMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFleet = FleetMachine.TestCase
