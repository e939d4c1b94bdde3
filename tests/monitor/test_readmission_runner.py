"""An engine returns to placement only through every check, in the source's order; the first that fails is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from narwhal.core.events import DrainOrdered, EjectionOrdered, EngineReadmitted, LegFailed, ReadmissionBlocked
from narwhal.core.vocabulary import EngineId, FailureClass, Leg, ReadmissionStep
from narwhal.ports import EngineAddress
from narwhal.testing.memory_engines import Condition, MemoryEngine, MemoryEngines
from tests.core.fleets import D1, D2, P1, P2
from tests.ha.parts import now, until
from tests.monitor.parts import Monitored
from tests.virtual import virtual

Change = Callable[[MemoryEngines], None]


class Ejected(Monitored):
    """A serving router that ejected engine P1."""

    async def eject(self, *engines: EngineId) -> None:
        if not self.plane.serving:
            await self.serve()
        for engine in engines or (P1,):
            self.report(EjectionOrdered(engine, "op", "test"))

    async def attempt(self, engine: EngineId = P1) -> None:
        (due,) = [e for e in self.plane.fleet.readmission.take_due(now=now()) if e == engine]
        await self.readmission.attempt(due)

    def change_before(self, question: int, change: Change) -> None:
        """Let something happen to the engines just before the question of this number."""
        ask = self.engines._asked

        async def after_the_change(method: str, address: EngineAddress, timeout_s: float) -> MemoryEngine:
            if len(self.engines.asked) + 1 == question:
                change(self.engines)
            return await ask(method, address, timeout_s)

        self.engines._asked = after_the_change  # type: ignore[method-assign]

    @property
    def blocked(self) -> tuple[ReadmissionStep, str]:
        (decision,) = self.decided(ReadmissionBlocked)
        assert isinstance(decision, ReadmissionBlocked)
        return decision.step, decision.reason


@virtual
async def test_the_checks_come_in_the_source_s_order_and_a_well_engine_passes_them() -> None:
    a = Ejected()
    await a.eject()
    await a.attempt()
    assert a.engines.asked == [
        ("health", P1),
        ("models", P1),
        ("telemetry", P1),
        ("infer", P1),
        ("infer", D1),
        ("telemetry", P1),
        ("health", P1),
    ]
    assert a.decided(EngineReadmitted) == [EngineReadmitted(P1, "process-1")]
    assert a.plane.fleet.engines[P1].eligible(now())


@pytest.mark.parametrize("condition", [Condition.GONE, Condition.HUNG, Condition.UNHEALTHY])
@virtual
async def test_an_engine_without_health_stops_at_health(condition: Condition) -> None:
    a = Ejected()
    await a.eject()
    a.engines[P1].condition = condition
    await a.attempt()
    assert a.blocked == (ReadmissionStep.HEALTH, condition.name.lower())
    assert a.engines.asked == [("health", P1)]


@virtual
async def test_our_own_full_pool_is_not_taken_for_health() -> None:
    a = Ejected()
    await a.eject()
    a.engines.full = True
    await a.attempt()
    assert a.blocked == (ReadmissionStep.HEALTH, "our own pool is full")


@virtual
async def test_an_engine_with_another_model_stops_at_model_identity() -> None:
    a = Ejected()
    await a.eject()
    a.engines[P1].models = ("other", "another")
    await a.attempt()
    assert a.blocked == (ReadmissionStep.MODEL_IDENTITY, "offers other, another, not m")


@virtual
async def test_an_engine_without_models_stops_at_model_identity() -> None:
    a = Ejected()
    await a.eject()
    a.engines[P1].models = ()
    await a.attempt()
    assert a.blocked == (ReadmissionStep.MODEL_IDENTITY, "offers nothing, not m")


@virtual
async def test_an_unreadable_list_of_models_stops_at_model_identity() -> None:
    a = Ejected()
    await a.eject()
    a.change_before(2, lambda engines: setattr(engines[P1], "condition", Condition.GONE))
    await a.attempt()
    assert a.blocked == (ReadmissionStep.MODEL_IDENTITY, "/v1/models gave no readable answer")


@virtual
async def test_an_engine_that_does_not_say_which_process_it_is_stops_at_generation_identity() -> None:
    a = Ejected()
    await a.eject()
    a.change_before(3, lambda engines: setattr(engines[P1], "condition", Condition.GONE))
    await a.attempt()
    assert a.blocked == (ReadmissionStep.GENERATION_IDENTITY, "/metrics gave no readable answer")


@virtual
async def test_a_prefill_engine_that_cannot_compute_stops_at_kv_transfer_after_two_partners() -> None:
    a = Ejected()
    await a.eject()
    a.engines[P1].condition = Condition.SICK
    await a.attempt()
    step, reason = a.blocked
    assert step is ReadmissionStep.KV_TRANSFER
    assert reason == ("with d1: prefill leg failed: inference_status; with d2: prefill leg failed: inference_status")


@virtual
async def test_a_decode_engine_proves_that_it_can_take_kv() -> None:
    a = Ejected()
    await a.eject(D1)
    a.engines[D1].condition = Condition.SICK
    await a.attempt(D1)
    step, reason = a.blocked
    assert step is ReadmissionStep.KV_TRANSFER
    assert reason.startswith("with p1: decode leg failed")
    assert ("infer", P2) in a.engines.asked


@virtual
async def test_one_sick_partner_does_not_keep_an_engine_out() -> None:
    a = Ejected()
    await a.eject()
    a.engines[D1].condition = Condition.SICK
    await a.attempt()
    assert a.plane.fleet.engines[P1].eligible(now())


@virtual
async def test_an_engine_that_restarted_during_the_checks_stops_at_generation_identity() -> None:
    a = Ejected()
    await a.eject()
    a.change_before(6, lambda engines: engines[P1].restart())
    await a.attempt()
    assert a.blocked == (ReadmissionStep.GENERATION_IDENTITY, "the process changed during the checks")


@virtual
async def test_an_engine_that_fails_last_stops_at_final_health() -> None:
    a = Ejected()
    await a.eject()
    a.change_before(7, lambda engines: setattr(engines[P1], "condition", Condition.GONE))
    await a.attempt()
    assert a.blocked == (ReadmissionStep.FINAL_HEALTH, "gone")


@virtual
async def test_a_passed_engine_starts_without_evidence_and_keeps_its_drain() -> None:
    a = Ejected()
    await a.eject()
    a.report(DrainOrdered(P1, "op", ""), LegFailed(P1, Leg.PREFILL, FailureClass.OVERLOAD))
    await a.attempt()
    engine = a.plane.fleet.engines[P1]
    assert engine.ejection is None
    assert engine.streaks.nonzero() == frozenset()
    assert engine.drained


@virtual
async def test_two_engines_that_are_each_other_s_only_partners_come_back_together() -> None:
    """Each can prove itself only with the other, and both are ejected."""
    a = Ejected()
    await a.eject(P1, P2, D1, D2)
    a.engines[P2].condition = a.engines[D2].condition = Condition.GONE
    async with a.running():
        await until(lambda: len(a.decided(EngineReadmitted)) == 2, within_s=10)
    assert a.plane.fleet.engines[P1].eligible(now())
    assert a.plane.fleet.engines[D1].eligible(now())


@pytest.mark.parametrize("method", ["health", "models", "telemetry", "infer"])
@virtual
async def test_a_check_that_crashes_is_named_and_the_next_attempt_is_due(method: str) -> None:
    a = Ejected()
    await a.eject()
    a.engines.crashing[method] = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        await a.attempt()
    step, reason = a.blocked
    assert reason == "the check crashed: RuntimeError('a bug')"
    assert (
        step
        == {
            "health": ReadmissionStep.HEALTH,
            "models": ReadmissionStep.MODEL_IDENTITY,
            "telemetry": ReadmissionStep.GENERATION_IDENTITY,
            "infer": ReadmissionStep.KV_TRANSFER,
        }[method]
    )
    a.engines.crashing.clear()
    await asyncio.sleep(1.1)
    await a.attempt()
    assert a.plane.fleet.engines[P1].eligible(now())


@pytest.mark.parametrize("asked", range(1, 8))
@virtual
async def test_an_attempt_that_is_cut_short_anywhere_leaves_the_engine_out_and_due_again(asked: int) -> None:
    a = Ejected()
    await a.eject()
    attempt = asyncio.create_task(a.attempt())
    await until(lambda: len(a.engines.asked) == asked, within_s=1)
    attempt.cancel()
    await asyncio.wait({attempt})
    assert not a.plane.fleet.engines[P1].eligible(now())
    assert a.blocked[1] == "the attempt was cut short"
    await asyncio.sleep(1.1)
    await a.attempt()
    assert a.plane.fleet.engines[P1].eligible(now())
