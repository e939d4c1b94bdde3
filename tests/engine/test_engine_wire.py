"""The bodies of both legs, the ticket, and what answers say: each rule of the exchange as a row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from narwhal.core.faults import EngineFailedStatus, EngineFault, EngineOverloaded, KvTicketUnreadable
from narwhal.core.vocabulary import FailureClass as F
from narwhal.engine.classify import FAULTS, LegKind, Mishap, fault
from narwhal.engine.http1 import Head
from narwhal.engine.wire import (
    RawAnswer,
    decode_body,
    prefill_body,
    read_choices,
    read_document,
    read_ticket,
    whole_answer,
)
from narwhal.ports import EngineRefusal, KvTicket, KvTicketUnusable, NothingPinned

TICKET: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "4e81dc76",
    "remote_request_id": "cmpl-1-0",
    "remote_host": "10.0.0.7",
    "remote_port": 15601,
    "tp_size": 1,
    "remote_blocks_expiry_time": None,
    "some_future_key": {"kept": [1]},
}


def answer(document: Any, status: int = 200, **headers: bytes) -> RawAnswer:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return RawAnswer(Head(status, {name.replace("_", "-").encode(): value for name, value in headers.items()}), body)


# The prefill leg.

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"max_tokens": 50, "stream": True}, {"max_tokens": 1, "stream": False}),
        ({}, {"max_tokens": 1, "stream": False}),
        ({"max_completion_tokens": 50}, {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}),
        ({"stream_options": {"include_usage": True}, "stream": True}, {"max_tokens": 1, "stream": False}),
        ({"min_tokens": 5, "min_completion_tokens": 5}, {"max_tokens": 1, "stream": False}),
        ({"n": 1, "best_of": 1}, {"max_tokens": 1, "stream": False}),
        ({"logprobs": True, "top_logprobs": 5}, {"max_tokens": 1, "stream": False}),
        (
            {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "cache_salt": "s"},
            {
                "tools": [{"type": "function"}],
                "response_format": {"type": "json_object"},
                "cache_salt": "s",
                "max_tokens": 1,
                "stream": False,
            },
        ),
    ],
)
def test_the_prefill_asks_for_one_token_and_a_ticket_and_keeps_what_is_rendered(
    sent: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = {"model": "m", "prompt": "x", **sent}
    before = json.dumps(body)
    leg = json.loads(prefill_body(body))
    assert leg == {"model": "m", "prompt": "x", **expected, "kv_transfer_params": ASK}
    assert json.dumps(body) == before, "the client's document is not touched"


# The decode leg.


def test_the_decode_gets_the_clients_own_bytes_and_the_ticket() -> None:
    raw = b'{ "model":"m", "temperature": 1.10, "seed": 12345678901234567, "prompt":"\\u00e9" } \n'
    leg = decode_body(raw, json.dumps(TICKET).encode())
    assert leg.startswith(raw.rstrip()[:-1])
    assert json.loads(leg) == {**json.loads(raw), "kv_transfer_params": TICKET}


def test_without_a_ticket_the_decode_gets_the_request_as_it_is() -> None:
    assert decode_body(b'{"model":"m"}', None) == b'{"model":"m"}'


# The ticket.


@pytest.mark.parametrize(
    "blocks",
    [[[1, 2, 3]], [[], [4]], [1, 2, 3], [[0]]],
    ids=["groups", "one empty group", "flat", "block zero"],
)
def test_a_good_ticket_is_passed_on_whole(blocks: Any) -> None:
    ticket = {**TICKET, "remote_block_ids": blocks}
    read = read_ticket({"kv_transfer_params": ticket})
    assert not isinstance(read, NothingPinned)
    assert (json.loads(read[0]), read[1]) == (ticket, "4e81dc76")


@pytest.mark.parametrize("blocks", [[[]], [[], []]])
def test_empty_groups_mean_that_nothing_is_pinned(blocks: Any) -> None:
    assert read_ticket({"kv_transfer_params": {**TICKET, "remote_block_ids": blocks}}) == NothingPinned()


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        "x",
        {},
        *[
            {key: value for key, value in TICKET.items() if key != gone}
            for gone in TICKET
            if gone.startswith("remote_")
        ][:5],
        {**TICKET, "remote_engine_id": ""},
        {**TICKET, "remote_request_id": None},
        {**TICKET, "remote_host": 7},
        {**TICKET, "remote_port": 0},
        {**TICKET, "remote_port": True},
        {**TICKET, "remote_port": "15601"},
        {**TICKET, "remote_block_ids": None},
        {**TICKET, "remote_block_ids": []},
        {**TICKET, "remote_block_ids": [[1], 2]},
        {**TICKET, "remote_block_ids": [["1"]]},
        {**TICKET, "remote_block_ids": [True]},
        {**TICKET, "remote_block_ids": [-1]},
    ],
)
def test_a_malformed_ticket_is_never_passed_on(broken: Any) -> None:
    with pytest.raises(KvTicketUnreadable):
        read_ticket({"kv_transfer_params": broken})


def test_no_ticket_at_all_is_a_failed_kv_handoff() -> None:
    with pytest.raises(KvTicketUnreadable) as error:
        read_ticket({"choices": []})
    assert error.value.failure_class is F.KV_HANDOFF


def test_a_ticket_is_spent_once() -> None:
    ticket = KvTicket(b"{}", engine_id="e", issued_at=100.0, max_age_s=20.0)
    assert ticket.fate == "orphaned"
    assert (ticket.spend(now=119.0), ticket.fate) == (b"{}", "consumed")
    with pytest.raises(AssertionError, match="twice"):
        ticket.spend(now=119.0)


def test_a_ticket_that_is_too_old_is_dropped_and_is_no_evidence() -> None:
    ticket = KvTicket(b"{}", engine_id="e", issued_at=100.0, max_age_s=20.0)
    with pytest.raises(KvTicketUnusable) as error:
        ticket.spend(now=120.5)
    assert (error.value.failure_class, ticket.fate) == (None, "discarded")


# What answers say.

CHOICE = {"index": 0, "text": "a", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("status", "body", "headers", "failure_class"),
    [
        (408, {"error": {"message": "slow"}}, {}, F.OVERLOAD),
        (429, {"error": {"message": "busy"}}, {}, F.OVERLOAD),
        (503, {"error": {"message": "engine busy", "type": "ServiceUnavailableError"}}, {}, F.OVERLOAD),
        (503, {"error": {"message": "max_num_queued_reqs reached: queue is full"}}, {}, F.OVERLOAD),
        (503, {"error": {"message": "paused", "type": "ServiceUnavailableError"}}, {}, F.INFERENCE_STATUS),
        (503, {"error": {"message": "the engine is sleeping"}}, {"retry_after": b"2"}, F.INFERENCE_STATUS),
        (503, b"", {"retry_after": b"2"}, F.OVERLOAD),
        (503, b"", {}, F.INFERENCE_STATUS),
        (503, {"error": {"message": "EngineCore encountered an issue."}}, {}, F.INFERENCE_STATUS),
        (500, {"error": {"message": "Internal server error"}}, {}, F.INFERENCE_STATUS),
        (502, b"bad gateway", {}, F.INFERENCE_STATUS),
        (301, b"", {}, F.INFERENCE_STATUS),
        (202, b"{}", {}, F.INFERENCE_STATUS),
        (200, {"error": {"message": "engine died"}}, {}, F.INFERENCE_STATUS),
        (200, {"object": "error", "message": "engine died"}, {}, F.INFERENCE_STATUS),
        (200, b"<html>", {}, F.INFERENCE_STATUS),
        (200, b"", {}, F.INFERENCE_STATUS),
        (200, [1], {}, F.INFERENCE_STATUS),
    ],
)
def test_a_bad_answer_carries_its_class(status: int, body: Any, headers: dict[str, bytes], failure_class: F) -> None:
    with pytest.raises((EngineOverloaded, EngineFailedStatus)) as error:
        read_document(answer(body, status, **headers), "d1")
    assert error.value.failure_class is failure_class
    assert "d1" in str(error.value)


def test_an_overloaded_engine_says_when_to_come_again() -> None:
    with pytest.raises(EngineOverloaded) as error:
        read_document(answer(b"", 429, retry_after=b"7"), "d1")
    assert (error.value.status, error.value.retry_after_s) == (429, 7.0)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422])
def test_a_client_error_is_a_refusal_and_no_fault(status: int) -> None:
    document = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": status}}
    refusal = read_document(answer(document, status), "d1")
    assert isinstance(refusal, EngineRefusal)
    assert (refusal.status, json.loads(refusal.body)) == (status, document)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"object": "error", "message": "no", "type": "X"}, "no"),
        (b"plain text", "plain text"),
        (b"", "(no text)"),
    ],
)
def test_a_refusal_in_another_shape_is_given_openais(body: Any, message: str) -> None:
    refusal = read_document(answer(body, 404), "d1")
    assert isinstance(refusal, EngineRefusal)
    error = json.loads(refusal.body)["error"]
    assert message in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "choices",
    [None, [], "x", [7], [{**CHOICE, "finish_reason": None}], [{**CHOICE, "finish_reason": "abort"}]],
)
def test_a_result_without_finished_choices_is_a_failure(choices: Any) -> None:
    with pytest.raises(EngineFailedStatus):
        read_choices({"choices": choices}, "d1")


def test_internal_addresses_do_not_reach_the_client() -> None:
    document = {"choices": [CHOICE], "kv_transfer_params": TICKET, "ec_transfer_params": None}
    whole = whole_answer(dict(document), json.dumps(document).encode())
    assert json.loads(whole.body) == {"choices": [CHOICE], "ec_transfer_params": None}


def test_an_answer_without_secrets_is_passed_on_byte_for_byte() -> None:
    body = b'{ "choices": [ {"finish_reason": "stop"} ], "kv_transfer_params": null, "usage": {"prompt_tokens": 3} }'
    whole = whole_answer(json.loads(body), body)
    assert (whole.body, whole.usage) == (body, (3, None))


# The table of mishaps.


@pytest.mark.parametrize(
    ("mishap", "classes"),
    [
        (Mishap.NO_SOCKET, (None, None, None)),
        (Mishap.REFUSED, (F.CONNECTION, F.CONNECTION, F.CONNECTION)),
        (Mishap.CONNECT_TIMEOUT, (F.TIMEOUT, F.TIMEOUT, F.TIMEOUT)),
        (Mishap.LOST, (F.CONNECTION, F.CONNECTION, F.CONNECTION)),
        (Mishap.CUT, (F.CONNECTION, F.STREAM, F.STREAM)),
        (Mishap.GARBLED, (F.CONNECTION, F.STREAM, F.STREAM)),
        (Mishap.UNANSWERED, (F.TIMEOUT, F.TIMEOUT, F.STREAM)),
        (Mishap.NEVER_STARTED, (F.STREAM, F.STREAM, F.STREAM)),
        (Mishap.SILENT, (F.STREAM, F.STREAM, F.STREAM)),
        (Mishap.DEADLINE, (None, None, None)),
    ],
)
def test_a_mishap_has_the_class_of_its_leg(mishap: Mishap, classes: tuple[F | None, ...]) -> None:
    kinds = (LegKind.PREFILL, LegKind.WHOLE, LegKind.STREAM)
    assert tuple(fault(mishap, kind, "e").failure_class for kind in kinds) == classes


def test_every_mishap_says_which_engine_did_what_on_which_leg() -> None:
    for mishap, row in FAULTS.items():
        for kind in row:
            error = fault(mishap, kind, "d1")
            assert isinstance(error, EngineFault)
            assert str(error) == f"engine d1 {mishap} ({kind} leg)"
