"""KV tickets from both sides: the ledger of the engine that issues them, the scrutiny of the engine that is given one.

The fetch of the KV is a real HTTP request from the decode engine to the prefill engine named in the ticket, which hands
each one out once. So a decode depends on a living prefill of the same generation, as it does over NIXL.
Source: wire.md, 1.2, 2.2 and 2.3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from narwhal.testing.stub_engine.bodies import Prompt

BLOCK_TOKENS: Final = 128
_REMEMBERED_MAX: Final = 10_000


class KvOutcome(StrEnum):
    """What became of one fetch. Only the last two fail visibly: the others are answered 200, with a wrong text."""

    FRESH = "fresh"
    REUSED = "reused"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    WRONG_ENGINE = "wrong_engine"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer of the prefill engine: whose KV it is, if it still has it."""

    outcome: KvOutcome
    digest: str = ""
    tokens: int = 0


@dataclass(slots=True)
class _Issued:
    prompt: Prompt
    issued_at: float
    fetched: bool = False
    lapsed: bool = False


class TicketLedger:
    """The tickets of one generation of a prefill engine. `now` is loop seconds."""

    def __init__(self, *, engine_id: str, lease_s: float, now: Callable[[], float]) -> None:
        self._engine_id = engine_id
        self._lease_s = lease_s
        self._now = now
        self._issued: OrderedDict[str, _Issued] = OrderedDict()
        self._pinned: OrderedDict[str, _Issued] = OrderedDict()

    def issue(self, remote_request_id: str, prompt: Prompt) -> None:
        """Pin the KV of `prompt` until it is fetched or its lease is over."""
        self._issued[remote_request_id] = self._pinned[remote_request_id] = _Issued(prompt, self._now())
        while len(self._issued) > _REMEMBERED_MAX:
            forgotten, _ = self._issued.popitem(last=False)
            self._pinned.pop(forgotten, None)

    def fetch(self, remote_request_id: str, engine_id: str) -> Fetched:
        """Hand the KV out if it is there, once. Sweep first: what is past its lease is gone."""
        if engine_id != self._engine_id:
            return Fetched(KvOutcome.WRONG_ENGINE)
        ticket = self._issued.get(remote_request_id)
        if ticket is None:
            return Fetched(KvOutcome.UNKNOWN)
        outcome = KvOutcome.REUSED if ticket.fetched else KvOutcome.EXPIRED if ticket.lapsed else KvOutcome.FRESH
        if outcome is KvOutcome.FRESH:
            ticket.fetched = True
            del self._pinned[remote_request_id]
        return Fetched(outcome, ticket.prompt.digest, len(ticket.prompt.tokens))

    def sweep(self) -> int:
        """Release what nobody fetched within the lease; return how many that were."""
        horizon = self._now() - self._lease_s
        lapsed = 0
        while self._pinned and next(iter(self._pinned.values())).issued_at <= horizon:
            _, ticket = self._pinned.popitem(last=False)
            ticket.lapsed = True
            lapsed += 1
        return lapsed

    @property
    def pinned_tokens(self) -> int:
        """How many tokens of KV wait to be fetched."""
        return sum(len(ticket.prompt.tokens) for ticket in self._pinned.values())


def ticket_params(
    *, prompt: Prompt, engine_id: str, remote_request_id: str, host: str, stub_url: str
) -> dict[str, Any]:
    """Return the dict that a NIXL prefill answers with, and `stub_url`, where the KV can be fetched."""
    blocks = -(-len(prompt.tokens) // BLOCK_TOKENS)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": engine_id,
        "remote_request_id": remote_request_id,
        "remote_host": host,
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(prompt.tokens),
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
        "stub_url": stub_url,
    }


class Scrutiny(StrEnum):
    """What a real decode engine does with the shape of a ticket.

    GOOD: it fetches. FATAL: it dies at once. PARKED: it waits for ever, and dies when the client gives up. SHORT (the
    ticket of a shorter prompt): it waits for ever.
    """

    GOOD = "good"
    FATAL = "fatal"
    PARKED = "parked"
    SHORT = "short"


_ADDRESS_KEYS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def scrutinise(params: Mapping[str, Any], prompt_tokens: int) -> Scrutiny:
    """Return what a real engine would make of `params` for a prompt of so many tokens."""
    stated = params.get("remote_num_tokens")
    remote_tokens = stated if type(stated) is int else 0
    short = 0 < remote_tokens < prompt_tokens
    needed = remote_tokens if short else prompt_tokens
    if not _enough_blocks(params.get("remote_block_ids"), -(-needed // BLOCK_TOKENS)):
        return Scrutiny.FATAL
    if any(params.get(key) in (None, "") for key in _ADDRESS_KEYS):
        return Scrutiny.PARKED
    return Scrutiny.SHORT if short else Scrutiny.GOOD


def _enough_blocks(block_ids: Any, needed: int) -> bool:
    """Whether every group (or the flat list of older engines) names at least `needed` blocks."""
    if not isinstance(block_ids, list) or not block_ids:
        return False
    groups = block_ids if isinstance(block_ids[0], list) else [block_ids]
    return all(
        isinstance(group, list) and len(group) >= max(needed, 1) and all(type(block) is int for block in group)
        for group in groups
    )


class KvFetcher:
    """The decode side: fetches KV over HTTP, and remembers what it fetched from engines that keep no ledger."""

    def __init__(self, *, timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))
        self._seen: OrderedDict[str, None] = OrderedDict()

    async def fetch(self, params: Mapping[str, Any], prompt: Prompt) -> Fetched:
        """Return what the engine named in `params` has for it. A ticket without `stub_url` is trusted once."""
        remote_request_id = str(params["remote_request_id"])
        stub_url = params.get("stub_url")
        if not isinstance(stub_url, str):
            outcome = KvOutcome.REUSED if remote_request_id in self._seen else KvOutcome.FRESH
            self._seen[remote_request_id] = None
            while len(self._seen) > _REMEMBERED_MAX:
                self._seen.popitem(last=False)
            return Fetched(outcome, prompt.digest, len(prompt.tokens))
        address = f"{stub_url}/stub/ticket/{quote(remote_request_id, safe='')}"
        try:
            async with self._session.get(address, params={"engine_id": str(params["remote_engine_id"])}) as answer:
                found = await answer.json()
            return Fetched(KvOutcome(found["outcome"]), found["digest"], found["tokens"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            return Fetched(KvOutcome.UNREACHABLE)

    async def close(self) -> None:
        """Close the connections to prefill engines."""
        await self._session.close()
