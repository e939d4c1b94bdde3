"""A lease whose term is known to be over is taken before it runs out, and only exactly that lease."""

from __future__ import annotations

import pytest

from narwhal.core.takeover import Attempt, Takeover, Wait
from narwhal.core.tenure import Tenure
from narwhal.core.vocabulary import FencingToken
from tests.core.leases import EPOCH, A, B, C, held_by, make_lease, nobody
from tests.core.watching import WHOLE_TTL_S, Watch

WHY = "its holder is dead: process 7 has ended"


@pytest.fixture
def watch() -> Watch:
    return Watch()


def over(takeover: Takeover, token: int) -> None:
    takeover.term_is_over(FencingToken(token), WHY)


def test_the_lease_of_a_term_that_is_over_is_deposed_at_the_next_look(watch: Watch) -> None:
    lease = make_lease()
    assert isinstance(watch.look(held_by(lease, left_s=1.9)), Wait)
    over(watch.takeover, 7)
    assert watch.look(held_by(lease, left_s=1.8)) == Attempt(EPOCH, FencingToken(7), WHY, deposing=lease)


@pytest.mark.parametrize("fit", [True, False])
def test_deposing_asks_no_more_of_this_router_than_a_lease_that_ran_out(watch: Watch, fit: bool) -> None:
    over(watch.takeover, 7)
    assert isinstance(watch.look(held_by(make_lease(), left_s=1.8), fit=fit), Attempt)


@pytest.mark.parametrize("token", [6, 8])
def test_the_end_of_another_term_deposes_nobody(watch: Watch, token: int) -> None:
    over(watch.takeover, token)
    assert watch.look(held_by(make_lease(token=7), left_s=1.8)) == Wait("router-a is active")


def test_a_later_term_of_the_same_router_is_left_alone(watch: Watch) -> None:
    over(watch.takeover, 7)
    again = make_lease(A, token=8, incarnation="router-a-2")
    assert watch.look(held_by(again, left_s=1.8)) == Wait("router-a is active")


def test_news_of_an_older_term_does_not_hide_the_newest(watch: Watch) -> None:
    over(watch.takeover, 7)
    over(watch.takeover, 5)
    assert isinstance(watch.look(held_by(make_lease(token=7), left_s=1.8)), Attempt)


def test_a_term_that_is_over_explains_why_its_lease_is_missing(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    over(watch.takeover, 7)
    assert watch.look(nobody()) == Attempt(EPOCH, FencingToken(7), WHY)


def test_it_does_not_explain_a_loss_of_all_data(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    over(watch.takeover, 7)
    assert isinstance(watch.look(nobody(epoch=None, token=0)), Wait)
    assert watch.waits_for_s(nobody(epoch=None, token=0)) == pytest.approx(WHOLE_TTL_S, abs=0.05)


def test_it_does_not_explain_a_newer_term_that_came_and_went(watch: Watch) -> None:
    watch.look(held_by(make_lease(), left_s=1.9))
    over(watch.takeover, 7)
    assert isinstance(watch.look(nobody(token=8)), Wait)


def test_the_lease_of_ones_own_former_process_is_deposed_too(watch: Watch) -> None:
    former = make_lease(B, incarnation="router-b-0")
    assert isinstance(watch.look(held_by(former, left_s=1.9)), Wait)
    over(watch.takeover, 7)
    assert isinstance(watch.look(held_by(former, left_s=1.8)), Attempt)


def test_another_holder_that_died_before_this_one_was_granted_costs_nothing(watch: Watch) -> None:
    over(watch.takeover, 7)
    assert isinstance(watch.look(held_by(make_lease(), left_s=1.8)), Attempt)
    assert watch.look(held_by(make_lease(C, token=9), left_s=2.0)) == Wait("router-c is active")


def test_only_a_term_that_was_fenced_says_that_it_is_over() -> None:
    """Not one that is still to be opened, nor one whose deadline has passed without anybody noticing yet."""
    tenure = Tenure(margin_s=0.2, clock_error=0.005)
    assert not tenure.over
    tenure.granted(make_lease(), sent_at=10.0)
    assert not tenure.over
    assert not tenure.held(99.0)
    assert not tenure.over
    tenure.fence("the local lease deadline has passed")
    assert tenure.over
    tenure.granted(make_lease(token=8), sent_at=100.0)
    assert not tenure.over


def test_a_router_that_runs_alone_has_no_term_that_could_be_over() -> None:
    tenure = Tenure(margin_s=0.2, clock_error=0.005)
    tenure.solo()
    assert not tenure.over
