"""Tenure and takeover under any schedule: at no instant do two routers hold, and tokens only grow."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from narwhal.core.vocabulary import RouterId
from tests.core.adversary import NAMES, RATES, T_S, World

names = st.sampled_from(NAMES)
STEPS_S = (0.001, 0.05, 0.1, 0.19, 0.21, 0.4, 0.8, 1.2, 1.6, 1.79, 1.9, 2.0, 2.1)


class LeaseMachine(RuleBasedStateMachine):
    """Every rule is a move of the adversary."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(RATES)

    @initialize(rates=st.permutations(RATES), up=st.booleans())
    def start(self, rates: list[float], up: bool) -> None:
        self.world = World(rates)
        if up:
            self.world.bring_up()

    @rule(seconds=st.sampled_from(STEPS_S))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(name=names)
    def a_router_sends(self, name: RouterId) -> None:
        self.world.send(name)

    @rule(name=names)
    def the_store_answers(self, name: RouterId) -> None:
        self.world.answer(name)

    @rule(name=names)
    def an_answer_arrives(self, name: RouterId) -> None:
        self.world.deliver(name)

    @rule(name=names, times=st.integers(1, 3), round_trip_s=st.sampled_from([0.0, 0.01, 0.1]))
    def a_router_has_a_good_moment(self, name: RouterId, times: int, round_trip_s: float) -> None:
        for _ in range(times):
            self.world.exchange(name, round_trip_s=round_trip_s)

    @rule(name=names, seconds=st.sampled_from(STEPS_S))
    def only_one_router_is_not_stopped(self, name: RouterId, seconds: float) -> None:
        self.world.attend(name, seconds)

    @rule(name=names)
    def a_call_is_lost(self, name: RouterId) -> None:
        self.world.lose(name)

    @precondition(lambda self: self.world.strays)
    @rule(data=st.data())
    def a_lost_request_arrives_after_all(self, data: st.DataObject) -> None:
        self.world.let_stray_arrive(data.draw(st.integers(0, len(self.world.strays) - 1)))

    @rule(name=names)
    def a_router_stops(self, name: RouterId) -> None:
        self.world.stop(name)

    @rule(name=names)
    def a_router_is_killed_and_restarted(self, name: RouterId) -> None:
        self.world.restart(name)

    @rule(name=names, peer=names)
    def a_router_looks_at_another(self, name: RouterId, peer: RouterId) -> None:
        self.world.look_at_peer(name, peer)

    @rule()
    def an_operator_deletes_the_lease(self) -> None:
        self.world.store.lease = None

    @precondition(lambda self: self.world.now >= self.world.data_lost_at + 3 * T_S)
    @rule()
    def the_store_loses_its_data(self) -> None:
        self.world.lose_data()

    @invariant()
    def at_most_one_router_holds(self) -> None:
        assert len(self.world.holding) <= 1, self.world.holding

    @invariant()
    def tokens_only_grow(self) -> None:
        granted = self.world.store.granted
        assert granted == sorted(set(granted))


LeaseMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=35, deadline=None)
TestLease = LeaseMachine.TestCase
