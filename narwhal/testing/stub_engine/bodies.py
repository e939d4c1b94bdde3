"""What a request may say: validated as vLLM validates it, with vLLM's two kinds of 400. Source: wire.md, 1.1 and 2.1.

A body that cannot be parsed is "Bad Request" (with a space); one that contradicts itself or the model's limits is
"BadRequestError".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from narwhal.testing.stub_engine.text import DEFAULT_ANSWER_TOKENS, digest_of, tokenise

COMPLETION_MAX_TOKENS: Final = 16

# What changes the tokens that a prompt is rendered to: it must be the same on both legs, or the KV does not fit.
_RENDER_KEYS: Final = (
    "add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs",
    "continue_final_message", "documents", "mm_processor_kwargs", "tools", "truncate_prompt_tokens",
)  # fmt: skip


class WireError(Exception):
    """The request is answered with an error document."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        self.status = status
        self.document = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        super().__init__(message)


def bad_request(message: str, param: str | None = None) -> WireError:
    """Return the error for a request that was understood and cannot be done."""
    return WireError(400, message, "BadRequestError", param)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class _CompletionBody(_Body):
    prompt: str | list[int] | list[str] | list[list[int]] | None = None


class _ChatBody(_Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and the identity that its answer follows from."""

    tokens: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can be run: `max_tokens` for each choice. `ticket` is its kv_transfer_params."""

    chat: bool
    request_id: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    finish_reason: str
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    ticket: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens all prompts have together."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


def parse_job(content: bytes, *, chat: bool, request_id: str, model: str, max_model_len: int) -> Job:
    """Return what `content` asks for. Raises WireError with the engine's answer when it cannot be done."""
    body = _validated(content, chat=chat)
    if body.model is not None and body.model != model:
        raise WireError(
            404, f"The model `{body.model}` does not exist. Valid aliases: {model}.", "NotFoundError", "model"
        )
    _check_semantics(body)
    prompts = _prompts(body)
    wanted = _wanted_tokens(body)
    longest = max(len(prompt.tokens) for prompt in prompts)
    _check_length(longest, wanted, max_model_len)
    options = body.stream_options or _StreamOptions()
    return Job(
        chat=chat,
        request_id=("chatcmpl-" if chat else "cmpl-") + request_id,
        prompts=prompts,
        max_tokens=wanted if wanted is not None else min(DEFAULT_ANSWER_TOKENS, max_model_len - longest),
        finish_reason="stop" if wanted is None else "length",
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        ticket=body.kv_transfer_params or {},
    )


def check_content_type(content_type: str) -> None:
    """Raise WireError unless the body says that it is JSON."""
    if content_type != "application/json" and not content_type.endswith("+json"):
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise WireError(400, f"1 validation error:\n  {{'msg': \"{message}\"}}", "Bad Request")


def _validated(content: bytes, *, chat: bool) -> _CompletionBody | _ChatBody:
    try:
        return _ChatBody.model_validate_json(content) if chat else _CompletionBody.model_validate_json(content)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        details = "\n".join(f"  {dict(item, loc=('body', *item['loc']))}" for item in items)
        message = f"{len(items)} validation error{'s' if len(items) > 1 else ''}:\n{details}"
        raise WireError(400, message, "Bad Request") from error


def _wanted_tokens(body: _CompletionBody | _ChatBody) -> int | None:
    """Return how many tokens the client asked for; chat without a limit answers until its natural end."""
    if isinstance(body, _ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def _check_semantics(body: _CompletionBody | _ChatBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.n is not None and body.n < 1:
        raise bad_request(f"n must be at least 1, got {body.n}.", "n")
    if body.temperature is not None and body.temperature < 0:
        raise bad_request(f"temperature must be non-negative, got {body.temperature}.", "temperature")
    wanted = _wanted_tokens(body)
    if wanted is not None and wanted < 1:
        raise bad_request(f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
    least = body.min_tokens or 0
    if least < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {least}.", "min_tokens")
    if wanted is not None and least > wanted:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={wanted}, got {least}.", "min_tokens")
    if isinstance(body, _ChatBody):
        _check_chat(body)


def _check_chat(body: _ChatBody) -> None:
    if body.tools is not None and not body.tools:
        raise bad_request("`tools` must not be an empty array. Set it to `null` or leave it out.", "tools")
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if not body.messages:
        raise bad_request("At least one message is needed.", "messages")


def _check_length(prompt_tokens: int, wanted: int | None, max_model_len: int) -> None:
    if prompt_tokens >= max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your request has {prompt_tokens}"
            " input tokens. Please reduce the length of the input messages.",
            "input_tokens",
        )
    if wanted is not None and wanted > max_model_len - prompt_tokens:
        raise bad_request(
            f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum context length is"
            f" {max_model_len} tokens and your request has {prompt_tokens} input tokens"
            f" ({wanted} > {max_model_len} - {prompt_tokens}).",
            "max_tokens",
        )


def _prompts(body: _CompletionBody | _ChatBody) -> tuple[Prompt, ...]:
    rendered_with = _rendering(body)
    carried = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if carried is not None:
        return (_prompt(_carried_tokens(carried), rendered_with),)
    if isinstance(body, _ChatBody):
        return (_prompt(tokenise(_chat_text(body.messages)), rendered_with),)
    return tuple(_prompt(tokens, rendered_with) for tokens in _completion_tokens(body.prompt))


def _prompt(tokens: list[int], rendered_with: bytes) -> Prompt:
    if not tokens:
        raise bad_request("The decoder prompt cannot be empty", "prompt")
    return Prompt(tuple(tokens), digest_of(tokens, rendered_with))


def _carried_tokens(carried: Any) -> list[int]:
    if not isinstance(carried, list) or not carried or not all(type(token) is int and token >= 0 for token in carried):
        raise bad_request("`kv_transfer_params.prompt_token_ids` must be a non-empty list of token ids.")
    return carried


def _completion_tokens(prompt: str | list[int] | list[str] | list[list[int]] | None) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenise(prompt)]
    if not prompt:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if all(isinstance(token, int) for token in prompt):
        return [[token for token in prompt if isinstance(token, int)]]
    return [tokenise(one) if isinstance(one, str) else list(one) for one in prompt if not isinstance(one, int)]


def _chat_text(messages: list[dict[str, Any]]) -> str:
    """Render messages as a chat template would: every part that the model sees, in order."""
    parts = []
    for message in messages:
        content = message.get("content")
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        parts.append(f"<|{message.get('role')}|> {content if isinstance(content, str) else json.dumps(content)}")
        if rest:
            parts.append(json.dumps(rest, sort_keys=True))
    return "\n".join([*parts, "<|assistant|>"])


def _rendering(body: _CompletionBody | _ChatBody) -> bytes:
    settings = {**(body.model_extra or {}), **body.model_dump(include=set(_RENDER_KEYS))}
    seen = {key: settings[key] for key in _RENDER_KEYS if settings.get(key) is not None}
    return json.dumps(seen, sort_keys=True).encode() if seen else b""
