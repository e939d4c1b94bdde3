"""Every trouble that a Redis can be in becomes one of our two exceptions, in time and in words that help."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from narwhal.config import HaSection
from narwhal.core.lease import Claim, LeaseRecord, Lost, Renewed
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.demo.redis_server import RedisServer
from narwhal.errors import StoreMisused, StoreUnavailable
from narwhal.store.opening import RedisStores, open_redis
from narwhal.store.trouble import TROUBLE
from tests.contract.samples import NONE, candidate, granted, handoff, member
from tests.drivers.store_proxy import Parrot, serving

Command = Callable[[RedisStores, LeaseRecord], Awaitable[object]]

EVERY: dict[str, Command] = {
    "OBSERVE": lambda stores, mine: stores.lease.observe(),
    "ACQUIRE": lambda stores, mine: stores.lease.acquire(candidate("router-b"), floor=NONE, epoch=None),
    "RENEW": lambda stores, mine: stores.lease.renew(mine),
    "CLAIM": lambda stores, mine: stores.lease.claim(mine, Claim(RouterId("router-b"), "x", mine.token, "unfit")),
    "ANNOUNCE": lambda stores, mine: stores.lease.announce(member("router-a")),
    "MEMBERS": lambda stores, mine: stores.lease.members(),
    "PUT_HANDOFF": lambda stores, mine: stores.handoff.put(handoff(mine.token, 9)),
    "GET_HANDOFF": lambda stores, mine: stores.handoff.get(),
    "RELEASE": lambda stores, mine: stores.lease.release(mine, successor=None),
}


def only(*names: str) -> dict[str, Command]:
    return {name: EVERY[name] for name in names}


SCRIPTS = only("OBSERVE", "ACQUIRE", "RENEW", "CLAIM", "ANNOUNCE", "PUT_HANDOFF", "RELEASE")


def opened(url: str, *, op_timeout_s: float = 5.0, username: str = "", password: str = "") -> aclosing[RedisStores]:
    ha = HaSection(redis_url=url, cluster="prod", lease_ttl_s=60.0, renew_every_s=5.0, op_timeout_s=op_timeout_s)
    return aclosing(open_redis(ha, client_name="router-a", username=username, password=password))


@pytest.fixture
async def admin(own_redis: RedisServer) -> AsyncIterator[Redis]:
    client = Redis(port=own_redis.port, decode_responses=True, protocol=2)
    yield client
    await client.aclose()


async def refused(
    commands: dict[str, Command], stores: RedisStores, mine: LeaseRecord, kind: type[Exception], *words: str
) -> None:
    """Check that each command fails as `kind`, naming itself, the address and `words`."""
    for name, command in commands.items():
        with pytest.raises(kind) as failure:
            await command(stores, mine)
        for word in (name, stores.address, *words):
            assert word in str(failure.value), (name, str(failure.value))


async def test_a_full_redis_keeps_the_lease_going_and_takes_no_document(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        mine = await granted(stores.lease, candidate())
        await admin.config_set("maxmemory", 1)
        assert await stores.lease.renew(mine) == Renewed(None)
        assert await stores.lease.claim(mine, Claim(RouterId("router-b"), "x", mine.token, "unfit"))
        await stores.lease.announce(member("router-a"))
        assert (await stores.lease.observe()).record == mine
        await refused(only("PUT_HANDOFF"), stores, mine, StoreUnavailable, "OOM", "maxmemory")
        assert await stores.lease.release(mine, successor=None)
        next_term = await granted(stores.lease, candidate("router-b"))
        assert next_term.token > mine.token


async def test_a_replica_is_never_read_as_a_free_lease(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        mine = candidate().with_token(FencingToken(1))
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
        await refused(SCRIPTS, stores, mine, StoreUnavailable, "READONLY", "ha.redis_url must lead to the master")
        await admin.config_set("replica-serve-stale-data", "no")
        await refused(only("GET_HANDOFF", "MEMBERS"), stores, mine, StoreUnavailable, "MASTERDOWN")
        await admin.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]
        await granted(stores.lease, candidate())


async def test_too_few_replicas_refuse_every_write_and_every_look(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        mine = await granted(stores.lease, candidate())
        await admin.config_set("min-replicas-to-write", 1)
        await refused(SCRIPTS, stores, mine, StoreUnavailable, "NOREPLICAS", "min-replicas-to-write")
        await admin.config_set("min-replicas-to-write", 0)
        assert await stores.lease.renew(mine) == Renewed(None)


async def test_a_redis_that_cannot_save_refuses_until_its_disk_is_well(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        mine = await granted(stores.lease, candidate())
        settings: Any = await admin.config_get("*")
        in_the_way = Path(settings["dir"]) / settings["dbfilename"]
        in_the_way.mkdir()
        await admin.config_set("save", "3600 1000000")
        await admin.bgsave()
        async with asyncio.timeout(20):
            while (await _persistence(admin))["rdb_last_bgsave_status"] != "err":
                await asyncio.sleep(0.02)
        await refused(SCRIPTS, stores, mine, StoreUnavailable, "MISCONF", "free its disk")
        assert await stores.handoff.get() is None, "reading goes on"
        in_the_way.rmdir()
        await admin.bgsave()
        async with asyncio.timeout(20):
            while (await _persistence(admin))["rdb_last_bgsave_status"] != "ok":
                await asyncio.sleep(0.02)
        assert await stores.lease.renew(mine) == Renewed(None)


async def _persistence(admin: Redis) -> dict[str, Any]:
    said: Any = await admin.info("persistence")
    return dict(said)


async def test_a_missing_or_wrong_password_is_said_without_the_password(own_redis: RedisServer, admin: Redis) -> None:
    await admin.config_set("requirepass", "right-one")
    mine = candidate().with_token(FencingToken(1))
    async with opened(own_redis.url) as stores:
        await refused(EVERY, stores, mine, StoreMisused, "NOAUTH", "NARWHAL_REDIS_PASSWORD")
    for user in ("", "nobody"):
        async with opened(own_redis.url, username=user, password="wrong-one") as stores:
            await refused(only("OBSERVE"), stores, mine, StoreMisused, "WRONGPASS", "NARWHAL_REDIS_USERNAME")
            with pytest.raises(StoreMisused) as failure:
                await stores.lease.observe()
            assert "wrong-one" not in str(failure.value)
    async with opened(own_redis.url.replace("//", "//default@"), password="right-one") as stores:
        assert (await stores.lease.observe()).record is None
        assert stores.address == own_redis.url, "neither user nor password is spoken of"


async def test_a_password_where_none_is_set_is_said(own_redis: RedisServer) -> None:
    async with opened(own_redis.url, password="needless") as stores:
        await refused(only("OBSERVE"), stores, candidate(), StoreMisused, "NARWHAL_REDIS_PASSWORD")


async def test_a_user_without_rights_is_told_which_rights_are_needed(own_redis: RedisServer, admin: Redis) -> None:
    rules = {
        "no-scripts": ["~*", "+client|setname"],
        "no-reads": ["~*", "+client|setname", "+eval", "+evalsha"],
        "no-keys": ["~elsewhere:*", "+@all"],
    }
    for user, rights in rules.items():
        await admin.execute_command("ACL", "SETUSER", user, "on", ">pw", *rights)  # type: ignore[no-untyped-call]
        async with opened(own_redis.url, username=user, password="pw") as stores:
            mine = candidate().with_token(FencingToken(1))
            await refused(EVERY, stores, mine, StoreMisused, "narwhal:*", "+evalsha")


async def test_the_rights_that_are_named_are_enough(own_redis: RedisServer, admin: Redis) -> None:
    rights = [word for word in TROUBLE["NOPERM"].advice.replace(",", "").split() if word[0] in "+~"]
    await admin.execute_command("ACL", "SETUSER", "least", "on", ">pw", *rights)  # type: ignore[no-untyped-call]
    async with opened(own_redis.url, username="least", password="pw") as stores:
        mine = await granted(stores.lease, candidate())
        for command in EVERY.values():
            await command(stores, mine)
        await stores.lease.wait_for_event(timeout_s=10)
        assert await stores.check() == []


async def test_a_revoked_right_heals_when_it_is_given_back(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        mine = await granted(stores.lease, candidate())
        await admin.config_set("requirepass", "sudden")
        await admin.execute_command("CLIENT", "KILL", "TYPE", "normal")  # type: ignore[no-untyped-call]
        with pytest.raises((StoreMisused, StoreUnavailable)):
            await stores.lease.renew(mine)
        with pytest.raises(StoreMisused, match="NOAUTH"):
            await stores.lease.renew(mine)
        fresh = Redis(port=own_redis.port, password="sudden", protocol=2)
        await fresh.config_set("requirepass", "")
        await fresh.aclose()
        assert await stores.lease.renew(mine) == Renewed(None)


async def test_a_script_that_hogs_redis_is_a_passing_trouble(own_redis: RedisServer, admin: Redis) -> None:
    await admin.config_set("busy-reply-threshold", 20)
    hog = Redis(port=own_redis.port, protocol=2, socket_timeout=30)
    async with opened(own_redis.url) as stores:
        mine = await granted(stores.lease, candidate())
        hogging = asyncio.ensure_future(hog.eval("while true do end", 0))
        async with asyncio.timeout(20):
            while not await _says(stores, "BUSY"):
                await asyncio.sleep(0.02)
        await admin.script_kill()
        await asyncio.gather(hogging, return_exceptions=True)
        assert await stores.lease.renew(mine) == Renewed(None)
    await hog.aclose()


async def _says(stores: RedisStores, word: str) -> bool:
    try:
        await stores.lease.observe()
    except StoreUnavailable as error:
        return word in str(error)
    return False


async def test_a_hung_redis_costs_each_command_its_time_and_no_more(own_redis: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    async with opened(own_redis.url, op_timeout_s=0.2) as stores, opened(own_redis.url) as calm:
        mine = await granted(calm.lease, candidate())
        own_redis.pause()
        for command in EVERY.values():
            began = loop.time()
            with pytest.raises(StoreUnavailable, match=r"no answer within 0\.2 s"):
                await command(stores, mine)
            assert 0.15 <= loop.time() - began < 2
        own_redis.resume()
        assert await calm.lease.renew(mine) == Renewed(None)


async def test_paused_writes_pause_every_look_at_the_lease(own_redis: RedisServer, admin: Redis) -> None:
    """A look that still says "mine" while renewals fail would deceive."""
    async with opened(own_redis.url, op_timeout_s=0.3) as stores, opened(own_redis.url) as calm:
        mine = await granted(calm.lease, candidate())
        await admin.execute_command("CLIENT", "PAUSE", "60000", "WRITE")  # type: ignore[no-untyped-call]
        await refused(only("OBSERVE", "RENEW"), stores, mine, StoreUnavailable, "no answer within")
        await admin.execute_command("CLIENT", "UNPAUSE")  # type: ignore[no-untyped-call]
        assert await calm.lease.renew(mine) == Renewed(None)


async def test_a_stopped_redis_is_unavailable_at_once_and_used_again_when_it_is_back(own_redis: RedisServer) -> None:
    async with opened(own_redis.url) as stores:
        mine = await granted(stores.lease, candidate())
        own_redis.kill()
        await refused(EVERY, stores, mine, StoreUnavailable, "check that Redis runs there")
        own_redis.revive()
        assert await stores.lease.renew(mine) == Lost(None), "it came back empty"
        await granted(stores.lease, candidate())


async def test_a_name_that_does_not_resolve_is_unavailable() -> None:
    async with opened("redis://no-such-host.invalid:6379/0") as stores:
        await refused(only("OBSERVE"), stores, candidate(), StoreUnavailable, "no-such-host.invalid")


async def test_waiting_without_redis_ends_in_time_raises_nothing_and_does_not_spin() -> None:
    loop = asyncio.get_running_loop()
    parrot = Parrot([b""])
    async with serving(parrot.handle) as port, opened(f"redis://127.0.0.1:{port}/0", op_timeout_s=0.2) as stores:
        began = loop.time()
        await stores.lease.wait_for_event(timeout_s=0.5)
        assert 0.45 <= loop.time() - began < 3
        assert 1 <= parrot.connections <= 6


async def test_waiting_on_a_hung_redis_ends_in_time(own_redis: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    async with opened(own_redis.url, op_timeout_s=0.2) as stores:
        await stores.lease.wait_for_event(timeout_s=0.01)
        own_redis.pause()
        began = loop.time()
        await stores.lease.wait_for_event(timeout_s=0.5)
        assert 0.45 <= loop.time() - began < 3
        own_redis.resume()


async def test_waiting_goes_on_after_a_restart_of_redis(own_redis: RedisServer) -> None:
    async with opened(own_redis.url) as stores, opened(own_redis.url) as others:
        await granted(others.lease, candidate())
        await stores.lease.wait_for_event(timeout_s=10)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            own_redis.kill()
            waiting = group.create_task(stores.lease.wait_for_event(timeout_s=60))
            await asyncio.sleep(0.05)
            own_redis.revive()
            await granted(others.lease, candidate())
            await waiting


@pytest.mark.parametrize("code", [*TROUBLE, "ERR"])
async def test_each_code_of_the_table_is_translated_as_the_table_says(code: str) -> None:
    said = f"{code} 3999 127.0.0.1:7000" if code in ("MOVED", "ASK") else f"{code} as Redis says"
    parrot = Parrot([b"+OK\r\n", f"-{said}\r\n".encode()])
    kind = TROUBLE[code].raises if code in TROUBLE else StoreMisused
    async with serving(parrot.handle) as port, opened(f"redis://127.0.0.1:{port}") as stores:
        words = ("as Redis says",) if code not in ("MOVED", "ASK") else (code,)
        await refused(EVERY, stores, candidate(), kind, code, *words)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b":7\r\n", b"$3\r\nabc\r\n", b"*1\r\n:1\r\n"],
)
async def test_what_is_not_our_redis_is_misuse(answer: bytes) -> None:
    parrot = Parrot([b"+OK\r\n", answer])
    async with serving(parrot.handle) as port, opened(f"redis://127.0.0.1:{port}") as stores:
        for command in only("OBSERVE", "ACQUIRE", "RENEW", "PUT_HANDOFF", "GET_HANDOFF").values():
            with pytest.raises(StoreMisused, match="Redis"):
                await command(stores, candidate())


async def test_a_redis_too_old_for_script_flags_is_misuse() -> None:
    too_old = b"-ERR Error compiling script (new function): user_script:1: unexpected symbol near '#'\r\n"
    parrot = Parrot([b"+OK\r\n", b"-NOSCRIPT No matching script.\r\n", too_old])
    async with serving(parrot.handle) as port, opened(f"redis://127.0.0.1:{port}") as stores:
        await refused(only("OBSERVE"), stores, candidate(), StoreMisused, "Redis 7.0 or newer", "user_script")


async def test_connecting_and_answering_share_one_bound() -> None:
    """The greeting takes 0.5 s and the answer 0.4 s, each within the time-out of a read; the command has 0.6 s."""
    loop = asyncio.get_running_loop()
    parrot = Parrot([b"+OK\r\n", b"*0\r\n"], trickle_s=0.1)
    async with serving(parrot.handle) as port, opened(f"redis://127.0.0.1:{port}", op_timeout_s=0.6) as stores:
        began = loop.time()
        with pytest.raises(StoreUnavailable, match=r"within 0\.6 s"):
            await stores.lease.members()
        assert loop.time() - began < 3


async def test_a_healthy_redis_passes_the_start_up_checks(own_redis: RedisServer) -> None:
    async with opened(own_redis.url) as stores:
        assert await stores.check() == []


async def test_the_start_up_checks_name_an_evicting_policy(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        await admin.config_set("maxmemory-policy", "volatile-lru")
        (finding,) = await stores.check()
        assert finding.severity == "warning"
        await admin.config_set("maxmemory", "100mb")
        (finding,) = await stores.check()
        assert finding.severity == "error"
        assert "volatile-lru" in finding.text
        assert "noeviction" in finding.text


async def test_the_start_up_checks_name_a_replica(own_redis: RedisServer, admin: Redis) -> None:
    async with opened(own_redis.url) as stores:
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
        (finding,) = await stores.check()
        assert finding.severity == "error"
        assert "slave" in finding.text
        assert "master" in finding.text


async def test_what_may_not_be_asked_is_a_finding(own_redis: RedisServer, admin: Redis) -> None:
    rights = ["~*", "+@all", "-info"]
    await admin.execute_command("ACL", "SETUSER", "blind", "on", ">pw", *rights)  # type: ignore[no-untyped-call]
    async with opened(own_redis.url, username="blind", password="pw") as stores:
        (finding,) = await stores.check()
        assert finding.severity == "warning"
        assert "could not check" in finding.text


async def test_the_start_up_checks_name_an_old_version_and_say_when_redis_is_silent() -> None:
    info = b"redis_version:6.2.14\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n"
    parrot = Parrot([b"+OK\r\n", b"$%d\r\n%s\r\n" % (len(info), info), b"$2\r\nhi\r\n", b""])
    async with serving(parrot.handle) as port, opened(f"redis://127.0.0.1:{port}") as stores:
        (finding,) = await stores.check()
        assert (finding.severity, "6.2.14 is too old" in finding.text) == ("error", True)
        assert ["could not check" in finding.text for finding in await stores.check()] == [True] * 3
        with pytest.raises(StoreUnavailable):
            await stores.check()
