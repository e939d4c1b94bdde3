"""What Redis can answer instead of an answer, as a table, and the translation into our two exceptions.

StoreUnavailable: no answer, or one that heals by itself; whether the command took place is unknown, ask again.
StoreMisused: a definite no that only a person can change.
Source: ha.md, 2.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from redis.exceptions import AuthenticationError, AuthorizationError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from narwhal.errors import StoreMisused, StoreUnavailable


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an error code means for us, and what a person can do about it."""

    raises: type[StoreUnavailable] | type[StoreMisused]
    advice: str


CREDENTIALS: Final = Trouble(
    StoreMisused, "set NARWHAL_REDIS_USERNAME and NARWHAL_REDIS_PASSWORD to what this Redis expects"
)
PERMISSION: Final = Trouble(
    StoreMisused,
    "grant the user ~narwhal:* with +evalsha +eval +get +mget +set +del +pexpire +pttl +time +hget +hmget +hset"
    " +xadd +xread +xrevrange +zadd +zrange +zremrangebyscore +client|setname, and +info for the start-up checks",
)
DEFINITE: Final = Trouble(
    StoreMisused, "is this Redis 7.0 or newer, or Valkey, and are the keys narwhal:* used by Narwhal alone?"
)
SILENCE: Final = Trouble(StoreUnavailable, "check that Redis runs there and that the network lets us through")

TROUBLE: Final[Mapping[str, Trouble]] = {
    "LOADING": Trouble(StoreUnavailable, "it is loading its data and will answer when done"),
    "BUSY": Trouble(StoreUnavailable, "a script of another program blocks it; SCRIPT KILL ends that script"),
    "CLUSTERDOWN": Trouble(StoreUnavailable, "the Redis Cluster is electing or incomplete"),
    "TRYAGAIN": Trouble(StoreUnavailable, "the Redis Cluster is moving the slot"),
    "ASK": Trouble(StoreUnavailable, "the Redis Cluster is moving the slot"),
    "MASTERDOWN": Trouble(StoreUnavailable, "this is a replica without its master; ha.redis_url must lead to a master"),
    "READONLY": Trouble(
        StoreUnavailable, "this is a replica, perhaps since a failover; ha.redis_url must lead to the master"
    ),
    "MISCONF": Trouble(StoreUnavailable, "it cannot save to its disk and refuses writes; free its disk"),
    "NOREPLICAS": Trouble(StoreUnavailable, "it has too few replicas (min-replicas-to-write) and refuses writes"),
    "OOM": Trouble(StoreUnavailable, "its memory is full; raise maxmemory or remove other data"),
    "UNKILLABLE": Trouble(StoreUnavailable, "a script of another program blocks it"),
    "NOAUTH": CREDENTIALS,
    "WRONGPASS": CREDENTIALS,
    "NOPERM": PERMISSION,
    "MOVED": Trouble(
        StoreMisused, "this Redis Cluster keeps our slot on another node; point ha.redis_url at that node"
    ),
    "WRONGTYPE": Trouble(
        StoreMisused, "another program uses a key of ours; choose another ha.cluster or remove the key"
    ),
}


def translate(error: RedisError | OSError, *, what: str, address: str, cap_s: float) -> StoreUnavailable | StoreMisused:
    """Return our exception for `error`: which command, at which address, what Redis said, and what to do."""
    match error:
        case AuthenticationError() | AuthorizationError():
            trouble, said = CREDENTIALS, f"answered {_said(error)!r}"
        case ResponseError():
            trouble, said = _answered(error), f"answered {_said(error)!r}"
        case InvalidResponse():
            trouble, said = DEFINITE, f"does not speak the Redis protocol ({error})"
        case RedisTimeoutError() | TimeoutError():
            trouble, said = SILENCE, f"gave no answer within {cap_s:g} s"
        case RedisError() if _code(error) in TROUBLE:
            trouble, said = TROUBLE[_code(error)], f"answered {_said(error)!r}"
        case _:
            trouble, said = SILENCE, f"cannot be reached ({str(error) or type(error).__name__})"
    return trouble.raises(f"{what}: Redis at {address} {said}; {trouble.advice}")


def _answered(error: ResponseError) -> Trouble:
    """Return the row for a refusal. A script reports a missing permission under the general code ERR."""
    said = _said(error)
    if "ACL failure in script" in said or "The user executing the script can't" in said:
        return PERMISSION
    return TROUBLE.get(_code(error), DEFINITE)


def _said(error: RedisError) -> str:
    """Return what the server wrote; the client library cuts the codes that it knows off."""
    return " ".join(part for part in (error.status_code, str(error)) if part).strip()


def _code(error: RedisError) -> str:
    return _said(error).partition(" ")[0]
