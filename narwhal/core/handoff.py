"""The handoff: the versioned control-plane document that the active writes on every monitor pass.

Instants never enter the document: holds carry their remaining or elapsed seconds, so that a router with another clock
can restore them. Documents are ordered by (fencing token, version).
Source: source, "Durable control-plane state" and "Resume validation"; decisions 15, 24, 26.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from narwhal.config import EngineEntry
from narwhal.core.vocabulary import (
    EjectionCause,
    EngineId,
    FailureClass,
    FencingToken,
    HoldKind,
    Leg,
    ReadmissionStep,
    Role,
    RouterId,
)
from narwhal.errors import HandoffRejected

HANDOFF_SCHEMA: Literal["narwhal.handoff"] = "narwhal.handoff"
HANDOFF_SCHEMA_VERSION: Literal[1] = 1

Age = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EjectionPart(_Part):
    """Why and how long ago (`age_s`) an engine was ejected, and how far readmission has come."""

    cause: EjectionCause
    age_s: Age
    detail: str = ""
    attempts: Count = 0
    last_step: ReadmissionStep | None = None
    last_reason: str = ""


class HoldPart(_Part):
    """A standing hold. `remaining_s` is set for timed holds only."""

    kind: HoldKind
    age_s: Age
    reason: str = ""
    actor: str = ""
    remaining_s: Age | None = None
    partner: EngineId | None = None
    attempts: Count = 0


class StreakPart(_Part):
    """A non-zero failure streak; `leg` is set for the per-leg streak of decision 9."""

    failure_class: FailureClass
    leg: Leg | None = None
    count: Annotated[int, Field(ge=1)]


class EnginePart(_Part):
    """One engine's place in the control plane."""

    id: EngineId
    url: str
    role: Role
    generation: str | None = None
    ejection: EjectionPart | None = None
    holds: tuple[HoldPart, ...] = ()
    streaks: tuple[StreakPart, ...] = ()
    excused: tuple[Leg, ...] = ()


class PairPart(_Part):
    """A prefill and a decode engine that are kept apart, for how long, and how often it was tried to rejoin them."""

    prefill: EngineId
    decode: EngineId
    age_s: Age
    attempts: Count = 0


class PairStreakPart(_Part):
    """How often in a row a pair has failed together."""

    prefill: EngineId
    decode: EngineId
    count: Annotated[int, Field(ge=1)]


class ConsolidationPart(_Part):
    """A role whose work rests on at most one eligible engine, and for how long."""

    role: Role
    age_s: Age


class LeasePart(_Part):
    """Who wrote the document, and under which lease."""

    router: RouterId
    incarnation: str
    token: FencingToken


class HandoffDocument(_Part):
    """The whole control plane of one cluster, as of one monitor pass."""

    schema_id: Literal["narwhal.handoff"] = Field(HANDOFF_SCHEMA, alias="schema")
    schema_version: Literal[1] = HANDOFF_SCHEMA_VERSION
    cluster: str
    version: Annotated[int, Field(ge=1)]
    lease: LeasePart
    written_wall: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    engines: tuple[EnginePart, ...]
    pairs_apart: tuple[PairPart, ...] = ()
    pair_streaks: tuple[PairStreakPart, ...] = ()
    consolidation_risk: tuple[ConsolidationPart, ...] = ()
    counters: dict[str, Count] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @property
    def order(self) -> tuple[FencingToken, int]:
        """(fencing token, version): the newest document is the greatest."""
        return (self.lease.token, self.version)

    @property
    def engine_set(self) -> str:
        """Fingerprint of the engines that the document describes."""
        return engine_set_fingerprint((part.id, part.url, part.role) for part in self.engines)

    def encode(self) -> str:
        """Return the document as readable JSON with stable key order."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, sort_keys=True)


def decode_handoff(text: str | bytes) -> HandoffDocument:
    """Return the document in `text`. Raises HandoffRejected naming each field that is wrong."""
    try:
        return HandoffDocument.model_validate_json(text)
    except ValidationError as error:
        raise HandoffRejected(
            [
                f"{'.'.join(str(part) for part in item['loc']) or '(document)'}: {item['msg']}"
                for item in error.errors(include_url=False)
            ]
        ) from error


def engine_set_fingerprint(engines: Iterable[tuple[str, str, str]]) -> str:
    """Return a short digest over the sorted (id, url, role) of `engines`."""
    text = json.dumps(sorted([name, url, str(role)] for name, url, role in engines))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def configured_engine_set(engines: Iterable[EngineEntry]) -> str:
    """Return the fingerprint of the configured fleet; comparable with `HandoffDocument.engine_set`."""
    return engine_set_fingerprint((entry.id, entry.url, entry.role) for entry in engines)


def mismatches(document: HandoffDocument, *, cluster: str, engines: Iterable[EngineEntry]) -> list[str]:
    """Return why `document` does not fit the configured fleet, field by field; empty when it does.

    The schema was checked when the document was decoded. Source: source, "Resume validation".
    """
    found = []
    if document.cluster != cluster:
        found.append(f"cluster: the document is of {document.cluster!r}, this router of {cluster!r}")
    described = Counter(part.id for part in document.engines)
    found += [f"engines.{name}: described {times} times" for name, times in described.items() if times > 1]
    written = {part.id: part for part in document.engines}
    configured = {EngineId(entry.id): entry for entry in engines}
    found += [
        f"engines.{name}: in the document, not in the configuration" for name in written if name not in configured
    ]
    found += [f"engines.{name}: configured, not in the document" for name in configured if name not in written]
    for name in written.keys() & configured.keys():
        if written[name].url != configured[name].url:
            found.append(f"engines.{name}.url: {written[name].url} in the document, {configured[name].url} configured")
    return sorted(found)
