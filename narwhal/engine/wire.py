"""vLLM's prefill/decode exchange over NIXL, without IO: the bodies of both legs, the ticket, and what an answer says.

Both legs must render the same tokens, so the prefill body differs from the client's only in what asks for output. The
decode engine gets the client's own bytes with the ticket appended. A ticket is checked for shape before any decode
engine sees it: a malformed one kills a real engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from narwhal.core.faults import EngineFailedStatus, EngineOverloaded, EnginePaused, KvTicketUnreadable
from narwhal.engine.classify import Verdict, verdict
from narwhal.engine.http1 import Head
from narwhal.ports import EngineRefusal, NothingPinned, Usage, WholeAnswer

ASK_FOR_TICKET: Final = orjson.Fragment(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
PREFILL_OMITS: Final = frozenset(
    {
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "n",
        "best_of",
        "echo",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
    }
)
"""What concerns only output: with one token and no stream it is refused or wasted on the prefill engine."""

TICKET_TEXTS: Final = ("remote_engine_id", "remote_request_id", "remote_host")
INTERNAL_FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")
"""They name hosts inside the fleet and never leave it."""

FAILED_FINISHES: Final = frozenset({"abort", "error"})
MESSAGE_CHARS_MAX: Final = 500


class RawAnswer(NamedTuple):
    """A complete answer of an engine as it came."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        """Its status."""
        return self.head.status


def prefill_body(body: Mapping[str, Any]) -> bytes:
    """Return the prefill leg's body: the client's, asking for one token, no stream, and a ticket."""
    leg = {name: value for name, value in body.items() if name not in PREFILL_OMITS}
    leg["stream"] = False
    leg["max_tokens"] = 1
    if "max_completion_tokens" in body:
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = ASK_FOR_TICKET
    return orjson.dumps(leg)


def decode_body(raw: bytes, ticket: bytes | None) -> bytes:
    """Return the decode leg's body: the client's bytes, with the ticket as their last member."""
    if ticket is None:
        return raw
    text = raw.rstrip()
    assert text.endswith(b"}"), "the request was checked to be a JSON object with members"
    return b'%b,"kv_transfer_params":%b}' % (text[:-1], ticket)


def read_ticket(document: Mapping[str, Any], engine: str = "prefill") -> tuple[bytes, str] | NothingPinned:
    """Return the ticket's JSON and the id of the engine process that holds the KV.

    Raises KvTicketUnreadable naming `engine`, which answered, and what is missing or malformed.
    """
    try:
        return _read_params(document.get("kv_transfer_params"))
    except KvTicketUnreadable as error:
        raise KvTicketUnreadable(f"engine {engine} answered without a usable ticket: {error}") from error


def _read_params(params: object) -> tuple[bytes, str] | NothingPinned:
    if not isinstance(params, dict):
        raise KvTicketUnreadable("there is no kv_transfer_params")
    for name in TICKET_TEXTS:
        if not isinstance(params.get(name), str) or not params[name]:
            raise KvTicketUnreadable(f"kv_transfer_params.{name} is missing or empty")
    port = params.get("remote_port")
    if type(port) is not int or not 0 < port < 65536:
        raise KvTicketUnreadable("kv_transfer_params.remote_port is not a port number")
    if _blocks_pinned(params.get("remote_block_ids")):
        return orjson.dumps(params), params["remote_engine_id"]
    return NothingPinned()


def _blocks_pinned(blocks: object) -> bool:
    """Whether any KV block is held. Newer engines list blocks per KV group, older ones in one flat list."""
    if not isinstance(blocks, list) or not blocks:
        raise KvTicketUnreadable("kv_transfer_params.remote_block_ids is missing or empty")
    groups = blocks if isinstance(blocks[0], list) else [blocks]
    for group in groups:
        if not isinstance(group, list) or (group and (set(map(type, group)) != {int} or min(group) < 0)):
            raise KvTicketUnreadable("kv_transfer_params.remote_block_ids is not a list of block numbers")
    return any(groups)


def read_document(answer: RawAnswer, engine: str) -> dict[str, Any] | EngineRefusal:
    """Return the JSON object of a 200, or the refusal of a 4xx.

    Raises EngineOverloaded, or EngineFailedStatus also for a 200 that carries an error instead of a result.
    """
    if answer.head.status != 200:
        return _refusal(answer, engine)
    document = _json(answer.body)
    if not isinstance(document, dict) or document.get("error") or document.get("object") == "error":
        text = f"engine {engine} answered 200 with an error: {error_message(answer.body)}"
        raise EngineFailedStatus(text, status=answer.status)
    return document


def _refusal(answer: RawAnswer, engine: str) -> EngineRefusal:
    retry_after_s = read_retry_after(answer.head)
    match verdict(answer.status, answer.body, retry_after=retry_after_s is not None):
        case Verdict.REFUSED:
            return EngineRefusal(answer.status, openai_error(answer))
        case Verdict.OVERLOADED:
            text = f"engine {engine} is overloaded ({answer.status}): {error_message(answer.body)}"
            raise EngineOverloaded(text, status=answer.status, retry_after_s=retry_after_s)
        case Verdict.PAUSED:
            text = f"engine {engine} is paused ({answer.status}): {error_message(answer.body)}"
            raise EnginePaused(text, status=answer.status)
        case Verdict.FAILED:
            text = f"engine {engine} answered {answer.status}: {error_message(answer.body)}"
            raise EngineFailedStatus(text, status=answer.status)


def read_choices(document: Mapping[str, Any], engine: str) -> list[dict[str, Any]]:
    """Return the choices of a result. Raises EngineFailedStatus when there are none or one of them did not finish."""
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices:
        raise EngineFailedStatus(f"engine {engine} answered 200 without choices", status=200)
    for choice in choices:
        if not isinstance(choice, dict):
            raise EngineFailedStatus(f"engine {engine} answered 200 with a choice that is none", status=200)
        reason = choice.get("finish_reason")
        if not reason or reason in FAILED_FINISHES:
            raise EngineFailedStatus(f"engine {engine} answered 200 with finish reason {reason!r}", status=200)
    return choices


def whole_answer(document: dict[str, Any], body: bytes) -> WholeAnswer:
    """Return the client's answer: the engine's bytes unless something internal must be taken out."""
    if strip_internal(document):
        body = orjson.dumps(document)
    return WholeAnswer(body, read_usage(document))


def strip_internal(document: dict[str, Any]) -> bool:
    """Remove fields that name hosts inside the fleet; return whether there were any with a value."""
    found = False
    for name in INTERNAL_FIELDS:
        if document.get(name) is not None:
            del document[name]
            found = True
    return found


def read_usage(document: Mapping[str, Any]) -> Usage | None:
    """Return the token counts of a result, or None."""
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(prompt if type(prompt) is int else None, completion if type(completion) is int else None)


def read_retry_after(head: Head) -> float | None:
    """Return the seconds of a Retry-After header, or None; the date form is not used by engines."""
    text = head.text(b"retry-after")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def error_message(body: bytes) -> str:
    """Return what an error body says, in whichever of the engines' shapes it comes."""
    document = _json(body)
    if isinstance(document, dict):
        error = document.get("error", document)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        return str(error)[:MESSAGE_CHARS_MAX]
    return body[:MESSAGE_CHARS_MAX].decode(errors="replace").strip() or "(no text)"


def openai_error(answer: RawAnswer) -> bytes:
    """Return the body of a refusal in OpenAI's shape; as it is when it already has it."""
    document = _json(answer.body)
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        return answer.body
    error = {
        "message": error_message(answer.body),
        "type": "invalid_request_error",
        "param": None,
        "code": answer.status,
    }
    return orjson.dumps({"error": error})


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
