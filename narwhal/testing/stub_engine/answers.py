"""The answers as vLLM writes them, key for key: whole documents and server-sent events. Source: wire.md, 2.1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from narwhal.testing.stub_engine.bodies import Job

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
INTERNAL_ERROR: Final = "Internal server error"
ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def error_document(message: str) -> dict[str, Any]:
    """Return the body of a 500."""
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def error_frame(message: str) -> bytes:
    """Return the frame of a stream that failed; vLLM writes this one with spaces."""
    return f"data: {json.dumps(error_document(message))}\n\n".encode()


def usage(job: Job, made: int) -> dict[str, Any]:
    """Return the usage of a stream or, with the detail keys, of a whole answer."""
    prompt_tokens = job.prompt_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + made, "completion_tokens": made}


class Framer:
    """Writes the frames of one stream. The parts that do not change are built once, since there is a frame a token."""

    def __init__(self, job: Job, *, model: str, created: int, fingerprint: str) -> None:
        self._job = job
        kind = "chat.completion.chunk" if job.chat else "text_completion"
        head = orjson.dumps({"id": job.request_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(fingerprint)

    def role(self, choice: int) -> bytes:
        """Return the first frame of a chat choice, which comes before any token."""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % choice
        ids = orjson.dumps(self._job.prompts[0].tokens) if self._job.return_token_ids else b"null"
        return self._head + delta + b'],"prompt_token_ids":' + ids + b',"prompt_text":null' + self._usage(0) + b"}\n\n"

    def token(self, choice: int, word: str, *, last: str | None = None, made: int = 0, padding: int = 0) -> bytes:
        """Return the frame of one token. `last` is the finish reason of the final one; `padding` bytes make it long."""
        text = orjson.dumps(word)
        finish = orjson.dumps(last)
        logprobs = self._padded_logprobs(padding) if padding else b"null"
        if self._job.chat:
            shape = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":%b%b,"token_ids":null}'
            stop = b',"stop_reason":null' if last else b""
        else:
            shape = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b,"token_ids":null}'
            stop = b',"stop_reason":null,"prompt_token_ids":null'
        entry = shape % (choice, text, logprobs, finish, stop)
        return self._head + entry + b"]" + (self._fingerprint if last else b"") + self._usage(made) + b"}\n\n"

    def final_usage(self, made: int) -> bytes:
        """Return the frame before the terminal marker for whoever asked for usage."""
        return self._head + b'],"usage":' + orjson.dumps(usage(self._job, made)) + b"}\n\n"

    def _usage(self, made: int) -> bytes:
        return b',"usage":' + orjson.dumps(usage(self._job, made)) if self._job.continuous_usage else b""

    def _padded_logprobs(self, size: int) -> bytes:
        filler = b"x" * size
        if self._job.chat:
            return b'{"content":[{"token":"%b","logprob":0.0,"bytes":null,"top_logprobs":[]}]}' % filler
        return b'{"text_offset":[0],"token_logprobs":[0.0],"tokens":["%b"],"top_logprobs":[null]}' % filler


def whole_answer(
    job: Job, texts: Sequence[str], *, model: str, created: int, fingerprint: str, finish_reason: str | None
) -> dict[str, Any]:
    """Return a complete answer; its `kv_transfer_params` is null until a ticket is put there."""
    made = len(texts) * job.max_tokens
    whole_usage = {**usage(job, made), "prompt_tokens_details": None, "completion_tokens_details": None}
    head = {"id": job.request_id, "object": "chat.completion" if job.chat else "text_completion", "created": created}
    tail: Mapping[str, Any] = {
        "service_tier": None, "system_fingerprint": fingerprint, "usage": whole_usage,
        "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
    }  # fmt: skip
    ids = list(job.prompts[0].tokens) if job.return_token_ids else None
    if job.chat:
        choices = [_chat_choice(index, text, finish_reason) for index, text in enumerate(texts)]
        return {**head, "model": model, "choices": choices, "prompt_logprobs": None, "prompt_token_ids": ids, **tail}
    choices = [_completion_choice(index, text, finish_reason, ids) for index, text in enumerate(texts)]
    return {**head, "model": model, "choices": choices, **tail}


def _chat_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "tool_calls": [], "reasoning": None,
    }  # fmt: skip
    return {
        "index": index, "message": message, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None,
        "token_ids": None, "routed_experts": None,
    }  # fmt: skip


def _completion_choice(index: int, text: str, finish_reason: str | None, ids: list[int] | None) -> dict[str, Any]:
    return {
        "index": index, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None,
        "token_ids": None, "prompt_logprobs": None, "prompt_token_ids": ids, "routed_experts": None,
    }  # fmt: skip


def json_answer(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return `document` as FastAPI sends it: compact, and without a charset."""
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json", headers=headers)
