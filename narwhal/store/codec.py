"""The small JSON values beside the lease: claim, release, member. Canonical like the lease record itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TypeVar

from narwhal.core.lease import Claim, Release
from narwhal.core.vocabulary import FencingToken
from narwhal.ports import Member

Value = TypeVar("Value", Claim, Release, Member)


def encode(value: Claim | Release | Member) -> str:
    """Return `value` as canonical JSON."""
    return json.dumps(asdict(value), sort_keys=True, separators=(",", ":"))


def decode(kind: type[Value], text: str) -> Value:
    """Return the `kind` in `text`. Raises ValueError saying what is wrong with it."""
    try:
        data = json.loads(text)
        if kind is Member and data["handoff"] is not None:
            token, version = data["handoff"]
            data["handoff"] = (FencingToken(token), version)
        return kind(**data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a {kind.__name__.lower()}: {error}") from error
