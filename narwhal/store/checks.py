"""What must be true of a Redis before a lease may be trusted to it, looked at once at start-up. Source: ha.md, 2.7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from narwhal.errors import StoreMisused
from narwhal.store.connection import RedisLink
from narwhal.store.replies import text

VERSION_MIN: Final = (7, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this Redis that a person should know; an `error` makes it unfit for the lease."""

    severity: Literal["error", "warning"]
    text: str


async def check_redis(link: RedisLink) -> Sequence[Finding]:
    """Return the findings about the Redis behind `link`, the worst first; empty when all is well.

    What may not be asked becomes a finding. Raises StoreUnavailable when Redis gave no answer.
    """
    try:
        said = _fields(text(await link.run("INFO", what="CHECK")))
    except StoreMisused as error:
        return [
            Finding("warning", f"could not check version, role and eviction policy ({error})"),
        ]
    found = [*_version(said), *_role(said), *_eviction(said)]
    return sorted(found, key=lambda finding: finding.severity)


def _fields(info: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in info.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in pairs}


def _version(said: Mapping[str, str]) -> Sequence[Finding]:
    version = said.get("redis_version", "")
    try:
        known = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return [Finding("warning", f"could not check the version: INFO says {version!r}")]
    if known >= VERSION_MIN:
        return []
    return [Finding("error", f"Redis {version} is too old: 7.0 or newer, or Valkey, is needed for the lease scripts")]


def _role(said: Mapping[str, str]) -> Sequence[Finding]:
    role = said.get("role")
    if role == "master":
        return []
    if role is None:
        return [Finding("warning", "could not check the role: INFO does not say it")]
    return [Finding("error", f"this Redis is a {role}, not a master: ha.redis_url must lead to the master")]


def _eviction(said: Mapping[str, str]) -> Sequence[Finding]:
    """Judge maxmemory-policy. An evicted lease is a lost lease, even the `volatile` policies take it: it has a TTL."""
    policy = said.get("maxmemory_policy")
    if policy == "noeviction":
        return []
    if policy is None:
        return [Finding("warning", "could not check maxmemory-policy: INFO does not say it")]
    advice = f"maxmemory-policy is {policy}: under memory pressure Redis would evict the lease; set it to noeviction"
    if said.get("maxmemory") == "0":
        return [Finding("warning", f"{advice} (no maxmemory is set, so nothing is evicted yet)")]
    return [Finding("error", advice)]
