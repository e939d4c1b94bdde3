"""Which failures a client may repeat, which are the dead router's, and which count against the pair."""

from __future__ import annotations

import httpx2
import pytest
from openai import APIConnectionError, APIStatusError

from narwhal.demo.load import Attempt, Death, DrillRequest, Load, Outcome
from narwhal.demo.prober import Prober, Sample

REQUEST = httpx2.Request("POST", "http://127.0.0.1:1/v1/completions")
DEATH = Death("router-a", killed_at=12.0, gone_at=12.001)


def refused() -> APIConnectionError:
    error = APIConnectionError(request=REQUEST)
    error.__cause__ = httpx2.ConnectError("refused")
    return error


def reset() -> APIConnectionError:
    error = APIConnectionError(request=REQUEST)
    error.__cause__ = httpx2.ReadError("reset")
    return error


def status(code: int, headers: dict[str, str] | None = None) -> APIStatusError:
    answer = httpx2.Response(code, headers=headers, request=REQUEST)
    return APIStatusError("no", response=answer, body=None)


class ScriptedLoad(Load):
    """A load whose one call ends as scripted."""

    def __init__(self, error: Exception | None, *, ended_at: float = 12.0005) -> None:
        super().__init__(Prober({}), model="stub")
        self.error = error
        self.ended_at = ended_at

    async def _call(self, kind: str, attempt: Attempt) -> None:
        if self.error is not None:
            raise self.error


async def outcome_of(
    error: Exception | None,
    *,
    router: str = "router-a",
    sent_at: float = 11.9,
    death: Death | None = DEATH,
    monkeypatch: pytest.MonkeyPatch,
    now: float = 12.0005,
    admitted_by: float | None = None,
) -> Outcome | None:
    """How one attempt ends the request; None when it may be sent again."""
    monkeypatch.setattr("narwhal.demo.load.lease_clock", lambda: now)
    load = ScriptedLoad(error)
    load.death = death
    request = DrillRequest("chat")
    ended = await load._try(request, Attempt(router, sent_at, admitted_by))
    return request.outcome if ended else None


async def test_a_refused_connection_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(refused(), router="router-b", monkeypatch=monkeypatch) is None


async def test_an_answer_that_says_not_executed_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    error = status(503, {"X-Narwhal-Not-Executed": "1"})
    assert await outcome_of(error, router="router-b", monkeypatch=monkeypatch) is None


async def test_a_plain_503_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(status(503), router="router-b", monkeypatch=monkeypatch) is Outcome.FAILED_OTHER


@pytest.mark.parametrize("code", [400, 429, 500, 502, 504])
async def test_any_other_error_status_is_a_failure(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = status(code, {"X-Narwhal-Not-Executed": "1"})
    assert await outcome_of(error, router="router-b", monkeypatch=monkeypatch) is Outcome.FAILED_OTHER


async def test_a_reset_while_the_killed_router_died_was_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(reset(), monkeypatch=monkeypatch) is Outcome.FAILED_IN_FLIGHT


async def test_a_stream_cut_by_the_death_was_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(reset(), admitted_by=11.95, monkeypatch=monkeypatch) is Outcome.FAILED_IN_FLIGHT


async def test_a_reset_before_the_kill_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(reset(), now=11.99, monkeypatch=monkeypatch) is Outcome.FAILED_OTHER


async def test_a_reset_without_any_kill_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(reset(), death=None, monkeypatch=monkeypatch) is Outcome.FAILED_OTHER


async def test_a_reset_on_the_router_that_lives_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(reset(), router="router-b", monkeypatch=monkeypatch) is Outcome.FAILED_OTHER


async def test_what_was_sent_to_a_router_already_dead_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(reset(), sent_at=12.002, now=12.003, monkeypatch=monkeypatch) is None


async def test_an_answer_without_error_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await outcome_of(None, monkeypatch=monkeypatch) is Outcome.OK


def test_traffic_goes_to_the_router_that_says_it_is_ready() -> None:
    prober = Prober({})
    assert prober.serving is None
    prober.note(Sample("router-a", 1.0, 1.1, True, 5, "active"))
    prober.note(Sample("router-b", 1.0, 1.1, False, None, "standby"))
    assert prober.serving == "router-a"
    prober.note(Sample("router-a", 2.0, 2.1, False, None, "ConnectionRefusedError"))
    assert prober.serving is None


def test_of_two_that_say_so_the_one_with_the_higher_token_gets_the_traffic() -> None:
    prober = Prober({})
    prober.note(Sample("router-a", 1.0, 1.1, True, 5, "active"))
    prober.note(Sample("router-b", 1.0, 1.1, True, 6, "active"))
    assert prober.serving == "router-b"
