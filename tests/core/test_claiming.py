"""When a standby asks the active to give way, and how it times its looks."""

from __future__ import annotations

import pytest

from narwhal.core.takeover import (
    CLAIM_BACKOFF_S,
    SIGNS_AGAINST,
    Attempt,
    PostClaim,
    TakeoverDecision,
    Wait,
)
from narwhal.core.vocabulary import PeerSign
from tests.core.leases import held_by, make_lease, nobody
from tests.core.watching import Watch, attempt


@pytest.fixture
def watch() -> Watch:
    return Watch()


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
