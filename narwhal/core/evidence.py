"""Failure evidence: the source's two tables as literal tables, and the streaks that they act on.

A streak is the number of failures since the last evidence that clears it. Two kinds are kept. The class streak follows
the source's clearing table to the letter. The leg streak (class and leg) is cleared only by a success of the same leg
or by a passed probe: an engine whose decode always fails is found out even while its prefill keeps succeeding.
A health probe excuses time-outs once. A leg that fills the streak again, without one success in between, is hung behind
a /health that knows nothing of it, and only inference can tell.
Source: source, "Failure evidence" and "Clearing failure evidence"; decisions 9 and 12.
"""

from __future__ import annotations

from typing import Final

from narwhal.core.vocabulary import Action, FailureClass, Leg, Success

ACTION: Final[dict[FailureClass, Action]] = {
    FailureClass.CONNECTION: Action.EJECT,
    FailureClass.TIMEOUT: Action.PROBE_HEALTH,
    FailureClass.STREAM: Action.VERIFY_INFERENCE,
    FailureClass.OVERLOAD: Action.PROBE_HEALTH,
    FailureClass.INFERENCE_STATUS: Action.VERIFY_INFERENCE,
    FailureClass.KV_HANDOFF: Action.VERIFY_INFERENCE,
    FailureClass.LIVENESS: Action.EJECT,
}

CLEARS: Final[dict[Success, frozenset[FailureClass]]] = {
    Success.CLIENT_ERROR: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS}),
    Success.HEALTH: frozenset(
        {FailureClass.CONNECTION, FailureClass.TIMEOUT, FailureClass.OVERLOAD, FailureClass.LIVENESS}
    ),
    Success.PREFILL: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS, FailureClass.KV_HANDOFF}),
    Success.DECODE: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS, FailureClass.STREAM}),
}

INFERENCE_CLASSES: Final = frozenset(
    failure_class for failure_class, action in ACTION.items() if action is Action.VERIFY_INFERENCE
)
"""What a passed inference probe clears: the recorded inference failures."""

LEG_OF: Final[dict[Success, Leg]] = {Success.PREFILL: Leg.PREFILL, Success.DECODE: Leg.DECODE}

assert ACTION.keys() == set(FailureClass), "a new class needs a row in the source's table"
assert CLEARS.keys() == set(Success), "a new success needs a row in the source's table"


class Streaks:
    """The consecutive failures of one engine, by class and by class and leg."""

    __slots__ = ("by_class", "by_leg", "excused")

    def __init__(self) -> None:
        self.by_class: dict[FailureClass, int] = {}
        self.by_leg: dict[tuple[FailureClass, Leg], int] = {}
        self.excused: set[Leg] = set()
        """Legs whose full streak of time-outs a health probe has cleared, and that have not succeeded since."""

    def fail(self, failure_class: FailureClass, leg: Leg | None = None) -> int:
        """Count one failure and return the longer of its class streak and its leg streak."""
        count = self.by_class.get(failure_class, 0) + 1
        self.by_class[failure_class] = count
        if leg is None:
            return count
        leg_count = self.by_leg.get((failure_class, leg), 0) + 1
        self.by_leg[failure_class, leg] = leg_count
        return max(count, leg_count)

    def succeed(self, success: Success) -> tuple[FailureClass, ...]:
        """Clear what `success` clears and return the classes that were not zero."""
        if not self.by_class and not self.by_leg and not self.excused:
            return ()
        cleared = [c for c in CLEARS[success] if self.by_class.pop(c, 0)]
        leg = LEG_OF.get(success)
        if leg is not None:
            self.excused.discard(leg)
        for key in [key for key in self.by_leg if key[1] is leg]:
            del self.by_leg[key]
            if key[0] not in cleared and key[0] not in self.by_class:
                cleared.append(key[0])
        return tuple(sorted(cleared))

    def absolve(self, classes: frozenset[FailureClass]) -> tuple[FailureClass, ...]:
        """Clear both kinds of streak of `classes` (a passed probe) and return those that were not zero."""
        cleared = {c for c in classes if self.by_class.pop(c, 0)}
        for key in [key for key in self.by_leg if key[0] in classes]:
            del self.by_leg[key]
            cleared.add(key[0])
        return tuple(sorted(cleared))

    def excuse(self, limit: int) -> tuple[FailureClass, ...]:
        """Clear what health clears, as `absolve` does, after a passed health probe; full time-outs are excused once."""
        self.excused |= {leg for leg in Leg if self.by_leg.get((FailureClass.TIMEOUT, leg), 0) >= limit}
        return self.absolve(CLEARS[Success.HEALTH])

    def clear(self) -> tuple[FailureClass, ...]:
        """Forget everything, and return what was not zero: a readmitted or restarted engine starts afresh."""
        self.excused.clear()
        return self.absolve(frozenset(FailureClass))

    def longest(self, failure_class: FailureClass) -> int:
        """Return the longer of the class streak and its leg streaks."""
        legs = (self.by_leg.get((failure_class, leg), 0) for leg in Leg)
        return max(self.by_class.get(failure_class, 0), *legs)

    def full(self, limit: int) -> tuple[FailureClass, ...]:
        """Return the classes of leg evidence whose longer streak has reached `limit`; liveness has its own limit."""
        return tuple(c for c in FailureClass if c is not FailureClass.LIVENESS and self.longest(c) >= limit)

    def nonzero(self) -> frozenset[FailureClass]:
        """Return the classes with a class streak above zero."""
        return frozenset(self.by_class)
