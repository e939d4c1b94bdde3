"""The lease as a value: what the holder writes into Redis, and what anyone may read there.

The record is compared byte for byte by the Redis scripts, so `encode` is canonical: sorted keys, no spaces.
Source: source, "Warm standby and lease ownership"; ha.md, 2.1.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace

from narwhal.core.vocabulary import FencingToken, RouterId

LEASE_VERSION = 1


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Which process this is, so that `kill-active` never signals a stranger that reuses the pid.

    `start_ticks` is field 22 of /proc/<pid>/stat (clock ticks since boot); `boot_id` names the running kernel, and
    `pid_namespace` the pid namespace in which `pid` counts. Fields that a platform does not tell are empty or 0.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One term of one router. `token` is 0 in a candidate's template; the store mints the real one."""

    router: RouterId
    incarnation: str
    token: FencingToken
    ttl_ms: int
    url: str
    admin_url: str
    engine_set: str
    schema: int
    version: str
    process: ProcessIdentity

    def encode(self) -> str:
        """Return the canonical JSON that the store keeps and compares."""
        return json.dumps({"v": LEASE_VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    def with_token(self, token: FencingToken) -> LeaseRecord:
        """Return the same term under `token`."""
        return replace(self, token=token)

    def same_term(self, other: LeaseRecord | None) -> bool:
        """Whether `other` is this very term: router, incarnation and token."""
        return other is not None and (self.router, self.incarnation, self.token) == (
            other.router,
            other.incarnation,
            other.token,
        )


def decode_lease(text: str) -> LeaseRecord:
    """Return the record in `text`. Raises ValueError saying what is wrong with it."""
    try:
        data = json.loads(text)
        version = data.pop("v")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a lease record: {error!r}") from error
    if version != LEASE_VERSION:
        raise ValueError(f"not a lease record of version {LEASE_VERSION}, but of {version!r}")
    process = data.pop("process", None)
    _check_types(data, {field.name: field.type for field in fields(LeaseRecord) if field.name != "process"})
    _check_types(process, {field.name: field.type for field in fields(ProcessIdentity)}, where="process: ")
    if data["token"] < 1 or data["ttl_ms"] < 1:
        raise ValueError("not a lease record: token and ttl_ms must be above 0")
    return LeaseRecord(process=ProcessIdentity(**process), **data)


_NUMBERS = ("int", "FencingToken")


def _check_types(data: object, types: dict[str, object], *, where: str = "") -> None:
    """Raise ValueError unless `data` has exactly the fields of `types`, each a text or a whole number."""
    found = data if isinstance(data, dict) else {}
    if found.keys() != types.keys():
        names = ", ".join(sorted(found.keys() ^ types.keys()))
        raise ValueError(f"not a lease record: {where}missing or unknown fields: {names}")
    wrong = [name for name, kind in types.items() if type(found[name]) is not (int if kind in _NUMBERS else str)]
    if wrong:
        raise ValueError(f"not a lease record: {where}fields of the wrong type: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class Claim:
    """A standby's request that the holder of `token` give way."""

    router: RouterId
    incarnation: str
    token: FencingToken
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """A holder's farewell, as recorded in the event stream: `token` will never admit again."""

    router: RouterId
    incarnation: str
    token: FencingToken
    successor: RouterId | None


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """One consistent look at the store. `pttl_ms` is the lease's remaining life, 0 when there is none.

    `epoch` names the data set: it is None on an empty database and changes when data were lost.
    `handoff` is the (fencing token, version) of the mirrored document, or None.
    """

    record: LeaseRecord | None
    pttl_ms: int
    token: FencingToken
    epoch: str | None
    claim: Claim | None
    release: Release | None
    handoff: tuple[FencingToken, int] | None


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is ours under `record.token`. `fresh` is False when it was ours already (a lost reply, repaired)."""

    record: LeaseRecord
    fresh: bool


@dataclass(frozen=True, slots=True)
class Occupied:
    """Somebody else holds the lease."""

    record: LeaseRecord
    pttl_ms: int


@dataclass(frozen=True, slots=True)
class DataLost:
    """The store is not the data set that the candidate observed; observe again and wait."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease lives for another TTL; `claim` is a standing request to give way, if there is one."""

    claim: Claim | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The stored lease is not this term any more: fence now."""

    holder: LeaseRecord | None


AcquireAnswer = Granted | Occupied | DataLost
RenewAnswer = Renewed | Lost
