"""The OpenAI surface as far as a router reads it, without IO: what a request asks for, and errors in OpenAI's shape.

Only what decides the way of a request is looked at; everything else is the engine's business. A request that is not
understood is refused here, before any engine is troubled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

REFUSED_FIELDS: Final = frozenset({"kv_transfer_params", "ec_transfer_params", "routed_dp_rank"})
REFUSED_PREFIXES: Final = ("bootstrap_", "disagg_")
"""Fields that would make an engine connect where a stranger says. Source: decision 21."""

WHOLE_ALWAYS: Final = ("prompt_logprobs", "use_beam_search", "prompt_embeds")
"""With any of these set, the KV of a prefill cannot be handed over, or would be ignored. Source: decision 22."""

CHOICES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as OpenAI's clients understand it; `headers` go with it."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the JSON document."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def frame(self) -> bytes:
        """Return the error as the last frame of a stream."""
        return b"data: %b\n\n" % self.body()


def invalid(message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> ApiError:
    """Return the refusal of a request that the client has to change."""
    return ApiError(status, message, "invalid_request_error", code, param)


def not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """Return the refusal of a method that `path` does not have; `allowed` goes into the Allow header."""
    text = f"{method} is not allowed on {path}; allowed: {allowed}"
    return ApiError(405, text, "invalid_request_error", "method_not_allowed", headers={"Allow": allowed})


class Completion(NamedTuple):
    """A readable completion request.

    `choices` is how many the answer must finish. `whole` says why it must go to one engine in one piece, or is None.
    """

    path: str
    body: Mapping[str, Any]
    raw: bytes
    model: str
    stream: bool
    choices: int
    whole: str | None


def read_completion(path: str, raw: bytes, models: Collection[str]) -> Completion | ApiError:
    """Return the request in `raw`, or why it is refused."""
    body = read_object(raw)
    if isinstance(body, ApiError):
        return body
    if (error := check_model(body, models)) is not None:
        return error
    if (error := _refused_field(body)) is not None:
        return error
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        return invalid("'stream' must be true or false", param="stream")
    choices = _choices(path, body)
    if isinstance(choices, ApiError):
        return choices
    return Completion(path, body, raw, body["model"], bool(stream), choices, whole_reason(body, choices))


def read_object(raw: bytes) -> dict[str, Any] | ApiError:
    """Return the JSON object in a request body, or why it is none."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return invalid(f"the request body is not valid JSON: {error}")
    if not isinstance(body, dict):
        return invalid(f"the request body must be a JSON object, not {type(body).__name__}")
    return body


def check_model(body: Mapping[str, Any], models: Collection[str]) -> ApiError | None:
    """Return why the model that `body` names cannot be had, or None."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        return invalid("you must name a model", param="model")
    if model in models:
        return None
    return invalid(
        f"The model `{model[:100]}` does not exist. Available: {', '.join(models)}.",
        param="model",
        status=404,
        code="model_not_found",
    )


def _refused_field(body: Mapping[str, Any]) -> ApiError | None:
    for name in body:
        if name in REFUSED_FIELDS or name.startswith(REFUSED_PREFIXES):
            return invalid(f"'{name}' is set by the router and must not be sent by a client", param=name)
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict) and any(name.startswith("kv_") for name in extra):
        return invalid("'vllm_xargs.kv_*' is set by the router and must not be sent by a client", param="vllm_xargs")
    return None


def _choices(path: str, body: Mapping[str, Any]) -> int | ApiError:
    """Return how many choices the answer will have: `n` for each prompt."""
    count = body.get("n")
    if count is None:
        count = 1
    if type(count) is not int or not 0 < count <= CHOICES_MAX:
        return invalid(f"'n' must be a whole number from 1 to {CHOICES_MAX}", param="n")
    prompt = body.get("prompt") if path == COMPLETIONS else None
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return count * len(prompt) if several and prompt else count


def whole_reason(body: Mapping[str, Any], choices: int) -> str | None:
    """Return why the request cannot be split into prefill and decode, or None."""
    if choices > 1:
        return "it asks for several choices or carries several prompts"
    best_of = body.get("best_of")
    if best_of is not None and best_of != 1:
        return "it asks for 'best_of'"
    for name in WHOLE_ALWAYS:
        value = body.get(name)
        if value is not None and value is not False:
            return f"it asks for '{name}'"
    if body.get("echo") and body.get("logprobs") is not None:
        return "it asks for 'echo' with 'logprobs'"
    return None
