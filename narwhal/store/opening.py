"""From the configuration to the two Redis stores, each purpose with a client of its own. Source: ha.md, 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from narwhal.config import HaSection
from narwhal.errors import StoreUnavailable
from narwhal.store.checks import Finding, check_redis
from narwhal.store.connection import RedisLink, connect, spoken_address
from narwhal.store.keys import Keys
from narwhal.store.redis_store import RedisHandoffStore, RedisLeaseStore
from narwhal.store.tail import BLOCK_S_MAX


@dataclass(frozen=True, slots=True)
class RedisStores:
    """Both stores over one Redis. `address` is how to speak of it: no user, no password."""

    lease: RedisLeaseStore
    handoff: RedisHandoffStore
    address: str
    links: tuple[RedisLink, ...]
    control: RedisLink

    async def check(self) -> Sequence[Finding]:
        """Return what is wrong or unknown about this Redis. Raises StoreUnavailable when it does not answer."""
        return await check_redis(self.control)

    async def aclose(self) -> None:
        """Close every connection; commands under way fail."""
        for link in self.links:
            await link.aclose()


def open_redis(
    ha: HaSection, *, client_name: str, password: str | None = None, username: str | None = None
) -> RedisStores:
    """Return the stores of `ha.cluster`; nothing is connected until the first command.

    `client_name` shows in `redis-cli client list`, followed by the purpose. Raises ConfigError for an unusable address.
    """
    address = spoken_address(ha.redis_url)

    def link(purpose: str, timeout_s: float) -> RedisLink:
        client = connect(
            ha.redis_url,
            timeout_s=timeout_s,
            client_name=f"{client_name}-{purpose}",
            username=username,
            password=password,
        )
        return RedisLink(client, address=address, op_timeout_s=ha.op_timeout_s)

    lease, control = link("lease", ha.op_timeout_s), link("control", ha.op_timeout_s)
    tail = link("tail", BLOCK_S_MAX + 1.0)
    keys = Keys.of(ha.cluster)
    return RedisStores(
        lease=RedisLeaseStore(lease, control, tail, keys),
        handoff=RedisHandoffStore(control, keys),
        address=address,
        links=(lease, control, tail),
        control=control,
    )


async def check_when_reachable(stores: RedisStores) -> Sequence[Finding]:
    """Return what `check` finds as soon as Redis answers; asks again, ever more seldom, until then."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable), wait=wait_exponential(multiplier=0.2, max=5)
    ):
        with attempt:
            return await stores.check()
    raise AssertionError("a retry without end has ended")
