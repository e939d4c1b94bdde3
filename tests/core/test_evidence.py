"""The source's two failure tables, row by row, and the streaks that they move."""

from __future__ import annotations

import pytest

from narwhal.core.evidence import ACTION, CLEARS, INFERENCE_CLASSES, Streaks
from narwhal.core.vocabulary import Action, FailureClass, Leg, Success

F = FailureClass


@pytest.mark.parametrize(
    ("failure_class", "action"),
    [
        (F.CONNECTION, Action.EJECT),
        (F.TIMEOUT, Action.PROBE_HEALTH),
        (F.STREAM, Action.VERIFY_INFERENCE),
        (F.OVERLOAD, Action.PROBE_HEALTH),
        (F.INFERENCE_STATUS, Action.VERIFY_INFERENCE),
        (F.KV_HANDOFF, Action.VERIFY_INFERENCE),
    ],
)
def test_a_full_streak_leads_to_the_action_of_its_row(failure_class: FailureClass, action: Action) -> None:
    assert ACTION[failure_class] is action


CLEARING = [
    (Success.CLIENT_ERROR, {F.CONNECTION, F.INFERENCE_STATUS}),
    (Success.HEALTH, {F.CONNECTION, F.TIMEOUT, F.OVERLOAD, F.LIVENESS}),
    (Success.PREFILL, {F.CONNECTION, F.INFERENCE_STATUS, F.KV_HANDOFF}),
    (Success.DECODE, {F.CONNECTION, F.INFERENCE_STATUS, F.STREAM}),
]


@pytest.mark.parametrize(("success", "cleared"), CLEARING)
def test_a_success_clears_exactly_the_classes_of_its_row(success: Success, cleared: set[FailureClass]) -> None:
    streaks = Streaks()
    for failure_class in FailureClass:
        streaks.fail(failure_class)
    assert set(streaks.succeed(success)) == cleared
    assert streaks.nonzero() == set(FailureClass) - cleared


def test_every_row_of_both_tables_is_tested() -> None:
    assert {success for success, _ in CLEARING} == set(Success) == CLEARS.keys()
    assert ACTION.keys() == set(FailureClass)


def test_a_success_names_only_classes_that_were_not_zero() -> None:
    streaks = Streaks()
    streaks.fail(F.CONNECTION)
    streaks.fail(F.STREAM)
    assert streaks.succeed(Success.PREFILL) == (F.CONNECTION,)
    assert streaks.succeed(Success.PREFILL) == ()


def test_classes_are_counted_apart() -> None:
    streaks = Streaks()
    assert [streaks.fail(F.STREAM, Leg.DECODE), streaks.fail(F.STREAM, Leg.DECODE)] == [1, 2]
    assert streaks.fail(F.TIMEOUT, Leg.DECODE) == 1


LEG_SUCCESS = [(Success.PREFILL, Leg.PREFILL), (Success.DECODE, Leg.DECODE)]


@pytest.mark.parametrize("leg", Leg)
@pytest.mark.parametrize("success", Success)
@pytest.mark.parametrize("failure_class", [f for f in FailureClass if f is not F.LIVENESS])
def test_a_leg_streak_is_cleared_only_by_a_success_of_the_same_leg(
    failure_class: FailureClass, success: Success, leg: Leg
) -> None:
    streaks = Streaks()
    streaks.fail(failure_class, leg)
    streaks.fail(failure_class, leg)
    streaks.succeed(success)
    same_leg = (success, leg) in LEG_SUCCESS
    assert streaks.by_leg.get((failure_class, leg), 0) == (0 if same_leg else 2)


def test_the_longer_of_class_and_leg_streak_counts() -> None:
    streaks = Streaks()
    for expected in (1, 2, 3):
        assert streaks.fail(F.INFERENCE_STATUS, Leg.DECODE) == expected
        streaks.succeed(Success.PREFILL)
    assert streaks.by_class == {}
    assert streaks.longest(F.INFERENCE_STATUS) == 3


def test_legs_of_one_class_add_up_in_its_class_streak() -> None:
    streaks = Streaks()
    streaks.fail(F.TIMEOUT, Leg.PREFILL)
    assert streaks.fail(F.TIMEOUT, Leg.DECODE) == 2
    assert streaks.by_leg == {(F.TIMEOUT, Leg.PREFILL): 1, (F.TIMEOUT, Leg.DECODE): 1}


def test_a_leg_streak_that_alone_was_left_is_named_when_it_clears() -> None:
    streaks = Streaks()
    streaks.fail(F.TIMEOUT, Leg.DECODE)
    streaks.succeed(Success.HEALTH)
    assert streaks.succeed(Success.DECODE) == (F.TIMEOUT,)


def test_a_class_is_not_named_while_its_class_streak_stands() -> None:
    streaks = Streaks()
    streaks.fail(F.TIMEOUT, Leg.DECODE)
    assert streaks.succeed(Success.DECODE) == ()
    assert streaks.by_class == {F.TIMEOUT: 1}


def test_absolution_clears_both_kinds_of_streak_of_its_classes_only() -> None:
    streaks = Streaks()
    for failure_class in (F.STREAM, F.KV_HANDOFF, F.TIMEOUT):
        streaks.fail(failure_class, Leg.DECODE)
    streaks.succeed(Success.DECODE)
    streaks.fail(F.STREAM, Leg.PREFILL)
    assert set(streaks.absolve(INFERENCE_CLASSES)) == {F.STREAM, F.KV_HANDOFF}
    assert streaks.by_class == {F.TIMEOUT: 1}
    assert streaks.by_leg == {}


def test_the_inference_classes_are_those_that_are_verified_by_inference() -> None:
    assert {F.STREAM, F.INFERENCE_STATUS, F.KV_HANDOFF} == INFERENCE_CLASSES
