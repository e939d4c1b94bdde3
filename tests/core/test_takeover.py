"""When a standby may ask for the lease, when it waits, and when it asks the active to give way."""

from __future__ import annotations

import pytest

from narwhal.core.lease import LeaseObservation
from narwhal.core.takeover import (
    SUCCESSOR_WINDOW_S,
    Attempt,
    Wait,
)
from narwhal.core.vocabulary import PeerSign
from tests.core.leases import EPOCH, B, C, held_by, make_lease, nobody, released
from tests.core.watching import WHOLE_TTL_S, Watch, attempt


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
