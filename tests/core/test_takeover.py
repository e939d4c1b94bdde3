"""When a standby may ask for the lease, when it waits, and when it asks the active to give way."""

from __future__ import annotations

from typing import Any

import pytest

from narwhal.core.lease import LeaseObservation, LeaseRecord
from narwhal.core.takeover import (
    CLAIM_BACKOFF_S,
    SIGNS_AGAINST,
    SUCCESSOR_WINDOW_S,
    Attempt,
    PostClaim,
    Takeover,
    TakeoverDecision,
    Wait,
)
from narwhal.core.vocabulary import FencingToken, PeerSign
from tests.core.leases import EPOCH, B, C, held_by, make_ha, make_lease, nobody, released

T = 2.0
WHOLE_TTL_S = T / (1 - 0.005)
"""The wait for a missing lease: a TTL, stretched by the clock error."""


def attempt(why: str, *, token: int = 7) -> Attempt:
    """The decision to ask for the lease, with the conditions under which it stands."""
    return Attempt(EPOCH, FencingToken(token), why)


class Watch:
    """Router B as it watches; every look takes 10 ms there and back."""

    def __init__(self, *, incarnation: str = "router-b-1", held: int = 0, **ha: Any) -> None:
        self.takeover = Takeover(B, make_ha(**ha), incarnation=incarnation, held=FencingToken(held))
        self.now = 50.0

    def look(self, seen: LeaseObservation, *, after_s: float = 0.1, fit: bool = True) -> TakeoverDecision:
        sent_at = self.now = self.now + after_s
        self.now += 0.01
        return self.takeover.decide(seen, sent_at=sent_at, now=self.now, fit=fit)

    def run_out(self, record: LeaseRecord) -> None:
        """See the lease of `record` through to the last tenth of a second."""
        for left_s, after_s in ((1.6, 0.1), (0.9, 0.69), (0.5, 0.39), (0.3, 0.19), (0.15, 0.14)):
            self.look(held_by(record, left_s=left_s), after_s=after_s)

    def peer(self, sign: PeerSign, *, times: int = 1, token: int | None = 7) -> None:
        for _ in range(times):
            self.takeover.saw_peer(sign, FencingToken(token) if token is not None else None)

    def waits_for_s(self, seen: LeaseObservation) -> float:
        """How long a lease that stays missing is waited for, to 20 ms."""
        started_at = self.now
        while isinstance(self.look(seen, after_s=0.01), Wait):
            assert self.now < started_at + 60, "waits for ever"
        return self.now - started_at


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_lease_that_runs_is_left_alone(watch: Watch) -> None:
    assert watch.look(held_by(make_lease(), left_s=1.9)) == Wait("router-a is active")


def test_a_lease_that_was_seen_to_run_out_is_taken(watch: Watch) -> None:
    watch.run_out(make_lease())
    assert watch.look(nobody(), after_s=0.2) == attempt("expired")


def test_an_attempt_is_repeated_until_somebody_has_the_lease(watch: Watch) -> None:
    watch.run_out(make_lease())
    assert isinstance(watch.look(nobody(), after_s=0.2), Attempt)
    assert isinstance(watch.look(nobody()), Attempt)
    assert watch.look(held_by(make_lease(C, token=8), left_s=2.0)) == Wait("router-c is active")


@pytest.mark.parametrize("left_s", [1.9, 1.0, 0.25])
def test_a_lease_that_vanished_before_its_time_is_waited_for(watch: Watch, left_s: float) -> None:
    watch.look(held_by(make_lease(), left_s=left_s))
    assert isinstance(watch.look(nobody()), Wait)
    assert watch.waits_for_s(nobody()) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_a_standby_that_did_not_see_the_last_margin_of_a_lease_does_not_call_it_expired(watch: Watch) -> None:
    """It may have been renewed, and deleted by hand, while this router was stopped."""
    watch.look(held_by(make_lease(), left_s=1.9))
    decision = watch.look(nobody(), after_s=2.5)
    assert isinstance(decision, Wait)
    assert watch.waits_for_s(nobody()) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_a_clock_step_of_redis_does_not_make_a_term_look_overdue(watch: Watch) -> None:
    """The clock jumps ahead by 1.7 s: the key ends early, while its holder rightly counts on what it was granted."""
    watch.look(held_by(make_lease(), left_s=1.9))
    watch.look(held_by(make_lease(), left_s=0.1))
    assert isinstance(watch.look(nobody()), Wait)


@pytest.mark.parametrize("early_s", [0.0005, 0.008])
def test_an_end_that_comes_a_rounding_error_early_is_still_the_expected_one(watch: Watch, early_s: float) -> None:
    watch.look(held_by(make_lease(), left_s=0.15))
    assert watch.look(nobody(), after_s=0.13 - early_s) == attempt("expired")


def test_a_term_that_nobody_saw_is_not_taken_for_the_one_that_ran_out(watch: Watch) -> None:
    watch.run_out(make_lease(token=7))
    assert isinstance(watch.look(nobody(token=8), after_s=0.2), Wait)


def test_a_missing_lease_with_other_data_proves_nothing(watch: Watch) -> None:
    watch.run_out(make_lease())
    assert isinstance(watch.look(nobody(epoch=None, token=0), after_s=0.2), Wait)
    assert isinstance(watch.look(nobody(epoch="epoch-2")), Wait)


def test_the_wait_names_its_length(watch: Watch) -> None:
    assert watch.look(nobody()) == Wait("the lease is missing without explanation; waiting 2.01 s")


def test_the_wait_starts_again_when_the_lease_comes_back(watch: Watch) -> None:
    watch.look(nobody())
    watch.look(nobody(), after_s=0.4)
    watch.look(held_by(make_lease(token=8), left_s=1.9))
    assert watch.waits_for_s(nobody(token=8)) == pytest.approx(WHOLE_TTL_S, abs=0.05)


@pytest.mark.parametrize(
    "later",
    [nobody(token=9), nobody(epoch="epoch-2"), nobody(token=0, epoch=None)],
    ids=["another-term", "other-data", "no-data"],
)
def test_the_wait_starts_again_when_something_happened_between_two_looks(watch: Watch, later: LeaseObservation) -> None:
    watch.look(nobody())
    watch.look(nobody(), after_s=0.4)
    assert isinstance(watch.look(later), Wait)
    assert watch.waits_for_s(later) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_the_wait_starts_again_after_a_long_gap_between_two_looks(watch: Watch) -> None:
    """A whole term may have come and gone with the data meanwhile, and the store looks as before."""
    empty = nobody(token=0, epoch=None)
    watch.look(empty)
    assert isinstance(watch.look(empty, after_s=3.0), Wait)
    assert watch.waits_for_s(empty) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_a_lease_that_ran_out_needs_no_second_proof_after_a_long_gap(watch: Watch) -> None:
    watch.run_out(make_lease())
    watch.look(nobody(), after_s=0.2)
    assert watch.look(nobody(), after_s=30.0) == attempt("expired")


def test_the_wait_starts_again_while_a_router_calls_itself_ready(watch: Watch) -> None:
    """It believes in a term that this look cannot see; it will notice with its next renewal."""
    empty = nobody(token=0, epoch=None)
    watch.look(empty)
    for _ in range(30):
        watch.peer(PeerSign.READY)
        assert isinstance(watch.look(empty), Wait)
    assert watch.waits_for_s(empty) == pytest.approx(WHOLE_TTL_S, abs=0.05)


@pytest.mark.parametrize("sign", sorted(set(PeerSign) - {PeerSign.READY}))
def test_no_other_sign_prolongs_the_wait(watch: Watch, sign: PeerSign) -> None:
    watch.look(nobody())
    watch.look(nobody(), after_s=0.4)
    watch.peer(sign)
    assert watch.waits_for_s(nobody()) == pytest.approx(WHOLE_TTL_S - 0.4, abs=0.05)


def test_a_sign_from_before_the_absence_does_not_prolong_the_wait(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.0))
    watch.peer(PeerSign.READY)
    watch.look(nobody())
    assert watch.waits_for_s(nobody()) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_an_attempt_stands_only_as_long_as_no_term_has_come_since_the_look(watch: Watch) -> None:
    watch.run_out(make_lease(token=7))
    decision = watch.look(nobody(token=7), after_s=0.2)
    assert isinstance(decision, Attempt)
    assert (decision.epoch, decision.after) == (EPOCH, 7)


def test_a_release_is_taken_up_at_once(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    assert watch.look(nobody(release=released())) == attempt("released")


def test_a_release_to_this_router_is_taken_up_at_once(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    assert watch.look(nobody(release=released(to=B))) == attempt("released")


def test_a_release_to_another_router_leaves_it_a_moment(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    to_c = nobody(release=released(to=C))
    assert watch.look(to_c) == Wait("released to router-c")
    assert watch.look(to_c, after_s=SUCCESSOR_WINDOW_S) == attempt("released")


def test_a_release_before_the_newest_term_explains_nothing(watch: Watch) -> None:
    watch.look(held_by(make_lease(token=8), left_s=1.9))
    assert isinstance(watch.look(nobody(token=8, release=released(token=7))), Wait)


def test_a_release_of_a_term_older_than_one_that_was_seen_explains_nothing(watch: Watch) -> None:
    """The store lost its token and went back in time; what this router saw itself counts for more."""
    watch.look(held_by(make_lease(token=8), left_s=1.9))
    assert isinstance(watch.look(nobody(token=7, release=released(token=7))), Wait)


def test_a_cold_start_after_a_clean_stop_waits_for_nothing(watch: Watch) -> None:
    assert watch.look(nobody(release=released())) == attempt("released")


def test_a_cold_start_without_a_release_waits_one_ttl_and_says_why(watch: Watch) -> None:
    watch.look(nobody())
    assert watch.waits_for_s(nobody()) == pytest.approx(WHOLE_TTL_S, abs=0.05)
    assert watch.look(nobody()) == attempt("missing for 2.01 s")


def test_a_cold_start_on_an_empty_store_waits_too(watch: Watch) -> None:
    empty = nobody(token=0, epoch=None)
    assert isinstance(watch.look(empty), Wait)
    assert watch.waits_for_s(empty) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_the_holder_s_ttl_is_waited_for_and_not_the_own_shorter_one() -> None:
    watch = Watch(lease_ttl_s=1.0, renew_every_s=0.2, op_timeout_s=0.15, margin_s=0.1)
    watch.look(held_by(make_lease(ttl_s=4.0), left_s=3.9))
    assert watch.waits_for_s(nobody()) == pytest.approx(4.0 / 0.995, abs=0.05)


def test_the_wait_allows_for_a_clock_that_runs_fast() -> None:
    watch = Watch(lease_ttl_s=10.0, clock_error=0.05)
    watch.look(nobody())
    assert watch.waits_for_s(nobody()) >= 10.0 / 0.95


def test_the_lease_of_the_own_former_process_is_waited_out(watch: Watch) -> None:
    former = make_lease(B, incarnation="router-b-0")
    assert watch.look(held_by(former, left_s=1.6)) == Wait("the lease of this router's former process still runs")
    watch.run_out(former)
    assert watch.look(nobody(), after_s=0.2) == attempt("expired")


def test_a_grant_whose_answer_was_lost_is_asked_for_again_at_once(watch: Watch) -> None:
    own = make_lease(B, token=8, incarnation="router-b-1")
    decision = watch.look(held_by(own, left_s=1.9))
    assert decision == attempt("granted to this process, and the answer was lost", token=8)


@pytest.mark.parametrize("held", [8, 9])
def test_a_term_of_this_process_that_was_fenced_is_waited_out(held: int) -> None:
    watch = Watch(held=held)
    own = make_lease(B, token=8, incarnation="router-b-1")
    assert isinstance(watch.look(held_by(own, left_s=1.9)), Wait)


def test_a_router_whose_own_term_was_the_last_one_asks_again_at_once() -> None:
    """Redis hung until the lease had run out: only the former holder knows that its term is over."""
    watch = Watch(held=7)
    assert watch.look(nobody(token=7)) == attempt("the last term was our own")


@pytest.mark.parametrize("token", [6, 8], ids=["data-went-back", "another-since"])
def test_a_router_whose_own_term_was_not_the_last_one_waits(token: int) -> None:
    watch = Watch(held=7)
    assert isinstance(watch.look(nobody(token=token)), Wait)


def test_a_newer_term_that_was_seen_counts_for_more_than_what_the_store_remembers() -> None:
    watch = Watch(held=7)
    watch.look(held_by(make_lease(token=8), left_s=1.9))
    assert isinstance(watch.look(nobody(token=7)), Wait)


def test_a_router_that_gave_way_leaves_its_successor_a_moment() -> None:
    watch = Watch(held=7)
    assert watch.look(nobody(token=7, release=released(B, token=7, to=C))) == Wait("released to router-c")


def test_every_sign_either_counts_against_the_active_or_clears() -> None:
    against = {PeerSign.DEGRADED, PeerSign.FENCED, PeerSign.REFUSED, PeerSign.TIMEOUT, PeerSign.UNREADABLE}
    assert against == SIGNS_AGAINST
    assert set(PeerSign) - against == {PeerSign.READY, PeerSign.NO_CAPACITY}


@pytest.mark.parametrize("sign", sorted(SIGNS_AGAINST))
def test_enough_bad_signs_in_a_row_make_a_claim(watch: Watch, sign: PeerSign) -> None:
    lease = make_lease()
    watch.look(held_by(lease, left_s=1.9))
    watch.peer(sign, times=2)
    assert watch.look(held_by(lease, left_s=1.9)) == Wait("router-a is active")
    watch.peer(sign)
    assert watch.look(held_by(lease, left_s=1.9)) == PostClaim(lease, "3 bad signs in a row")
    assert watch.takeover.signs[sign] == 3


@pytest.mark.parametrize("sign", sorted(set(PeerSign) - SIGNS_AGAINST))
def test_a_sign_that_is_not_against_the_active_clears_the_misses(watch: Watch, sign: PeerSign) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    for _ in range(3):
        watch.peer(PeerSign.DEGRADED, times=2)
        watch.peer(sign)
    assert watch.takeover.misses == 0
    assert isinstance(watch.look(held_by(make_lease(), left_s=1.9)), Wait)


def test_bad_signs_of_different_kinds_add_up(watch: Watch) -> None:
    lease = make_lease()
    watch.look(held_by(lease, left_s=1.9))
    for sign in (PeerSign.REFUSED, PeerSign.TIMEOUT, PeerSign.DEGRADED):
        watch.peer(sign, token=None)
    assert isinstance(watch.look(held_by(lease, left_s=1.9)), PostClaim)


def test_a_bad_sign_of_another_term_clears_the_misses(watch: Watch) -> None:
    watch.look(held_by(make_lease(token=7), left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=2)
    watch.peer(PeerSign.DEGRADED, token=6)
    assert watch.takeover.misses == 0


def test_a_new_term_clears_the_misses(watch: Watch) -> None:
    watch.look(held_by(make_lease(token=7), left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=3)
    assert watch.look(held_by(make_lease(token=8), left_s=1.9)) == Wait("router-a is active")


def test_the_number_of_misses_is_the_configured_one() -> None:
    watch = Watch(takeover_misses=5)
    watch.look(held_by(make_lease(), left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=4)
    assert isinstance(watch.look(held_by(make_lease(), left_s=1.9)), Wait)
    watch.peer(PeerSign.DEGRADED)
    assert isinstance(watch.look(held_by(make_lease(), left_s=1.9)), PostClaim)


def test_an_unfit_standby_claims_nothing(watch: Watch) -> None:
    lease = make_lease()
    watch.look(held_by(lease, left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=3)
    decision = watch.look(held_by(lease, left_s=1.9), fit=False)
    assert decision == Wait("router-a looks unfit, but so is this router")
    assert isinstance(watch.look(held_by(lease, left_s=1.9)), PostClaim)


def test_one_term_is_claimed_again_only_after_a_while(watch: Watch) -> None:
    lease = make_lease()
    watch.look(held_by(lease, left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=3)
    assert isinstance(watch.look(held_by(lease, left_s=1.9)), PostClaim)
    assert watch.look(held_by(lease, left_s=1.9)) == Wait("router-a was asked to give way")
    assert isinstance(watch.look(held_by(lease, left_s=1.9), after_s=CLAIM_BACKOFF_S), PostClaim)


def test_another_term_is_claimed_without_delay(watch: Watch) -> None:
    first, second = make_lease(token=7), make_lease(token=8)
    watch.look(held_by(first, left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=3)
    watch.look(held_by(first, left_s=1.9))
    watch.look(held_by(second, left_s=1.9))
    watch.peer(PeerSign.DEGRADED, times=3, token=8)
    assert isinstance(watch.look(held_by(second, left_s=1.9)), PostClaim)


def test_bad_signs_never_take_a_lease_that_runs(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    watch.peer(PeerSign.REFUSED, times=100)
    decisions = [watch.look(held_by(make_lease(), left_s=1.9)) for _ in range(200)]
    assert not any(isinstance(decision, Attempt) for decision in decisions)


def test_the_next_look_falls_within_the_last_margin_of_the_lease(watch: Watch) -> None:
    assert watch.takeover.look_within_s(watch.now) == float("inf")
    watch.look(held_by(make_lease(), left_s=1.9))
    within_s = watch.takeover.look_within_s(watch.now)
    assert 1.9 - 0.2 < within_s + 0.01 < 1.9
    watch.look(held_by(make_lease(), left_s=0.1), after_s=within_s)
    assert 0 < watch.takeover.look_within_s(watch.now) <= 0.05
    watch.look(nobody(), after_s=0.2)
    assert watch.takeover.look_within_s(watch.now) == float("inf")


@pytest.mark.parametrize("poll_every_s", [0.05, 0.1, 0.4])
def test_a_watcher_that_keeps_to_its_looks_calls_every_natural_end_expired(poll_every_s: float) -> None:
    """However the looks fall against the end of the lease."""
    for phase_ms in range(0, 400, 7):
        watch = Watch(poll_every_s=poll_every_s)
        ends_at = watch.now + 2.0 + phase_ms / 1000
        decision: TakeoverDecision = Wait("")
        while isinstance(decision, Wait):
            pause_s = min(poll_every_s, watch.takeover.look_within_s(watch.now))
            left_s = ends_at - (watch.now + pause_s)
            decision = watch.look(held_by(make_lease(), left_s=left_s) if left_s > 0 else nobody(), after_s=pause_s)
        assert decision == attempt("expired")
