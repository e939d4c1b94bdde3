"""From the raw answers of Redis to text and numbers, with a clear complaint where they are not what we wrote."""

from __future__ import annotations

from collections.abc import Sequence

from narwhal.core.lease import LeaseRecord, decode_lease
from narwhal.errors import StoreMisused
from narwhal.store.codec import Value, decode
from narwhal.store.connection import Reply


def items(reply: Reply, *, count: int | None = None) -> Sequence[Reply]:
    """Return a list answer's items, `count` of them where that is given; an absent list is empty."""
    if reply is None and count is None:
        return ()
    if not isinstance(reply, list) or count not in (None, len(reply)):
        raise StoreMisused(f"Redis answered {reply!r} where a list is due; is something else listening there?")
    return reply


def text(reply: Reply) -> str:
    """Return a string answer as text."""
    if isinstance(reply, bytes):
        return reply.decode(errors="backslashreplace")
    raise StoreMisused(f"Redis answered {reply!r} where text is due; is something else listening there?")


def number(reply: Reply) -> int:
    """Return a number, whether sent as one or as text; 0 when absent."""
    if reply is None:
        return 0
    if isinstance(reply, int):
        return reply
    try:
        return int(text(reply))
    except ValueError as error:
        raise StoreMisused(
            f"Redis keeps {reply!r} where a number is due; another program uses a key of ours"
        ) from error


def lease_record(reply: Reply, *, key: str) -> LeaseRecord | None:
    """Return the lease record that `key` holds, or None. Raises StoreMisused when it holds something else."""
    if reply is None:
        return None
    try:
        return decode_lease(text(reply))
    except ValueError as error:
        raise StoreMisused(_foreign(key, error)) from error


def value(kind: type[Value], reply: Reply, *, key: str) -> Value | None:
    """Return the claim, release or member that `key` holds, or None. Raises StoreMisused when foreign."""
    if reply is None:
        return None
    try:
        return decode(kind, text(reply))
    except ValueError as error:
        raise StoreMisused(_foreign(key, error)) from error


def _foreign(key: str, error: ValueError) -> str:
    return (
        f"{key}: {error}; another program or another version of Narwhal wrote it. Look with `redis-cli get '{key}'`,"
        " then remove it or choose another ha.cluster"
    )
