"""The names of everything that a cluster keeps in Redis. Source: ha.md, 2.1.

All share one hash tag and so live in one slot of a Redis Cluster: `narwhal:{prod-a}:lease`. Every value is text that
`redis-cli` shows as it is.

| Key | Type, life | Content |
|---|---|---|
| `lease` | string, the lease's TTL | the holder's record, canonical JSON, compared byte for byte |
| `token` | string | highest fencing token ever granted |
| `epoch` | string | random name of this data set; gone or different after data were lost |
| `claim` | string, 5 s | a standby's request that the holder give way, JSON |
| `release` | string | the last holder's farewell, JSON; also an event, but the stream is trimmed |
| `handoff` | hash | `ver tok schema eng sha doc at`: the mirrored handoff, `at` in unix milliseconds |
| `events` | stream, about 512 entries | `acquire release depose claim handoff` |
| `member:<id>` | string, 10 s | a router as it announced itself, JSON |
| `members` | sorted set | ids of the routers that announced themselves, by unix milliseconds; spares a scan |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CLAIM_TTL_MS: Final = 5_000
MEMBER_TTL_MS: Final = 10_000
EVENTS_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster."""

    prefix: str

    @classmethod
    def of(cls, cluster: str) -> Keys:
        """Return the keys of `cluster`."""
        return cls(f"narwhal:{{{cluster}}}:")

    @property
    def lease(self) -> str:
        """The holder's record."""
        return self.prefix + "lease"

    @property
    def token(self) -> str:
        """The highest fencing token granted."""
        return self.prefix + "token"

    @property
    def epoch(self) -> str:
        """The name of the data set."""
        return self.prefix + "epoch"

    @property
    def claim(self) -> str:
        """A request that the holder give way."""
        return self.prefix + "claim"

    @property
    def release(self) -> str:
        """The last farewell."""
        return self.prefix + "release"

    @property
    def handoff(self) -> str:
        """The mirrored handoff."""
        return self.prefix + "handoff"

    @property
    def events(self) -> str:
        """The event stream."""
        return self.prefix + "events"

    @property
    def members(self) -> str:
        """The index of members."""
        return self.prefix + "members"

    def member(self, router: str) -> str:
        """One router's announcement."""
        return f"{self.prefix}member:{router}"
