"""What a router may believe about its own lease: the arithmetic, and that a term which was fenced is over."""

from __future__ import annotations

import pytest

from narwhal.core.tenure import Tenure
from tests.core.leases import make_lease

VALID_S = 2.0 * (1 - 0.005) - 0.2


@pytest.fixture
def tenure() -> Tenure:
    return Tenure(margin_s=0.2, clock_error=0.005)


def test_nothing_is_held_before_a_grant(tenure: Tenure) -> None:
    assert not tenure.held(0.0)
    assert tenure.remaining_s(0.0) == 0.0
    assert tenure.token == 0


def test_the_deadline_counts_from_before_the_request_was_sent(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    assert tenure.valid_until == pytest.approx(10.0 + VALID_S)
    assert tenure.held(10.0 + VALID_S - 0.001)


def test_nothing_is_held_at_the_deadline_itself(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    assert not tenure.held(tenure.valid_until)


@pytest.mark.parametrize(
    ("ttl_s", "margin_s", "clock_error", "valid_s"),
    [(2.0, 0.2, 0.005, 1.79), (1.0, 0.1, 0.005, 0.895), (10.0, 0.5, 0.0, 9.5), (4.0, 0.05, 0.05, 3.75)],
)
def test_the_validity_is_the_ttl_less_clock_error_and_margin(
    ttl_s: float, margin_s: float, clock_error: float, valid_s: float
) -> None:
    tenure = Tenure(margin_s=margin_s, clock_error=clock_error)
    tenure.granted(make_lease(ttl_s=ttl_s), sent_at=100.0)
    assert tenure.remaining_s(100.0) == pytest.approx(valid_s)


def test_a_grant_that_arrives_after_its_own_deadline_opens_nothing(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    assert not tenure.held(10.0 + VALID_S + 0.05)


def test_a_renewal_extends_from_its_own_sending(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    tenure.renewed(sent_at=10.4, now=10.6)
    assert tenure.valid_until == pytest.approx(10.4 + VALID_S)


def test_a_late_reply_extends_by_no_more_than_a_prompt_one(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    tenure.renewed(sent_at=10.4, now=11.7)
    assert tenure.valid_until == pytest.approx(10.4 + VALID_S)


def test_replies_out_of_order_never_shorten_the_term(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    tenure.renewed(sent_at=10.8, now=10.9)
    tenure.renewed(sent_at=10.4, now=11.0)
    assert tenure.valid_until == pytest.approx(10.8 + VALID_S)


def test_a_reply_after_the_deadline_does_not_revive_the_term(tenure: Tenure) -> None:
    """A standby may already have concluded from the deadline that this term is over."""
    tenure.granted(make_lease(), sent_at=10.0)
    deadline = tenure.valid_until
    tenure.renewed(sent_at=deadline - 0.01, now=deadline)
    assert not tenure.held(deadline)
    assert tenure.remaining_s(deadline) == 0.0


def test_a_fence_is_final(tenure: Tenure) -> None:
    tenure.granted(make_lease(), sent_at=10.0)
    tenure.fence("test")
    tenure.renewed(sent_at=10.1, now=10.2)
    assert not tenure.held(10.2)
    assert tenure.record is None
    assert tenure.fenced_reason == "test"


def test_the_token_of_a_fenced_term_stays_readable(tenure: Tenure) -> None:
    tenure.granted(make_lease(token=7), sent_at=10.0)
    tenure.fence("test")
    assert tenure.token == 7


def test_a_new_grant_with_a_higher_token_begins_another_term(tenure: Tenure) -> None:
    tenure.granted(make_lease(token=7), sent_at=10.0)
    tenure.fence("test")
    tenure.granted(make_lease(token=8), sent_at=20.0)
    assert tenure.held(20.0)
    assert tenure.token == 8
    assert tenure.fenced_reason is None


@pytest.mark.parametrize("token", [6, 7])
def test_a_term_that_is_over_cannot_be_granted_again(tenure: Tenure, token: int) -> None:
    tenure.granted(make_lease(token=7), sent_at=10.0)
    tenure.fence("test")
    with pytest.raises(AssertionError, match="token"):
        tenure.granted(make_lease(token=token), sent_at=20.0)
    assert not tenure.held(20.0)


def test_a_router_alone_holds_without_end() -> None:
    tenure = Tenure(margin_s=0.2, clock_error=0.005)
    tenure.solo()
    assert tenure.held(1e9)
    assert tenure.token == 1
