"""The Redis stores beyond the contract: what lies in Redis, scripts that got lost, answers that got lost."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from narwhal.config import HaSection
from narwhal.core.lease import Claim, DataLost, Granted, Renewed
from narwhal.core.vocabulary import FencingToken, RouterId
from narwhal.demo.redis_server import RedisServer
from narwhal.errors import ConfigError, HandoffRejected, StoreMisused, StoreUnavailable
from narwhal.store import scripts
from narwhal.store.keys import EVENTS_MAX, Keys
from narwhal.store.opening import RedisStores, open_redis
from narwhal.store.redis_store import around_token
from tests.conftest import installed
from tests.contract.samples import NONE, candidate, granted, handoff, member
from tests.drivers.store_proxy import faulty_path

B = RouterId("router-b")
KEYS = Keys.of("prod")


def settings(url: str, **changes: Any) -> HaSection:
    """A cluster whose commands may take a while: this machine may be busy."""
    calm = {"lease_ttl_s": 60.0, "renew_every_s": 5.0, "op_timeout_s": 5.0}
    return HaSection(redis_url=url, cluster="prod", **{**calm, **changes})


def opened(url: str, **changes: Any) -> aclosing[RedisStores]:
    return aclosing(open_redis(settings(url, **changes), client_name="router-a"))


@pytest.fixture
async def stores(own_redis: RedisServer) -> AsyncIterator[RedisStores]:
    async with opened(own_redis.url) as stores:
        yield stores


@pytest.fixture
async def admin(own_redis: RedisServer) -> AsyncIterator[Redis]:
    client = Redis(port=own_redis.port, decode_responses=True, protocol=2)
    yield client
    await client.aclose()


async def test_everything_in_redis_is_plain_and_named_after_the_cluster(stores: RedisStores, admin: Redis) -> None:
    lease = stores.lease
    first = await granted(lease, candidate())
    await lease.release(first, successor=B)
    mine = await granted(lease, candidate())
    document = handoff(mine.token, 3)
    await lease.claim(mine, Claim(B, "its-life", mine.token, "unfit"))
    await lease.announce(member("router-a"))
    await stores.handoff.put(document)

    types = {key: await admin.type(key) for key in sorted(await admin.keys("*"))}
    assert types == {
        "narwhal:{prod}:claim": "string",
        "narwhal:{prod}:epoch": "string",
        "narwhal:{prod}:events": "stream",
        "narwhal:{prod}:handoff": "hash",
        "narwhal:{prod}:lease": "string",
        "narwhal:{prod}:member:router-a": "string",
        "narwhal:{prod}:members": "zset",
        "narwhal:{prod}:release": "string",
        "narwhal:{prod}:token": "string",
    }
    assert await admin.get("narwhal:{prod}:lease") == mine.encode()
    assert await admin.get("narwhal:{prod}:token") == str(mine.token)
    assert json.loads(await admin.get("narwhal:{prod}:claim") or "")["reason"] == "unfit"
    assert json.loads(await admin.get("narwhal:{prod}:release") or "")["successor"] == B
    kept: Any = await admin.hgetall("narwhal:{prod}:handoff")
    assert (kept["tok"], kept["ver"], kept["eng"]) == (str(mine.token), "3", document.engine_set)
    assert (kept["schema"], kept["doc"]) == ("narwhal.handoff/1", document.encode())
    assert kept["sha"].startswith("sha256:")
    assert kept["at"].isdecimal()
    assert set(kept) == {"tok", "ver", "schema", "eng", "sha", "doc", "at"}


async def test_each_value_lives_as_long_as_it_should(stores: RedisStores, admin: Redis) -> None:
    mine = await granted(stores.lease, candidate(ttl_ms=20_000))
    await stores.lease.claim(mine, Claim(B, "its-life", mine.token, "unfit"))
    await stores.lease.announce(member("router-a"))
    lives = {key: await admin.pttl(key) for key in (KEYS.lease, KEYS.claim, KEYS.member("router-a"), KEYS.token)}
    assert 10_000 < lives[KEYS.lease] <= 20_000
    assert 0 < lives[KEYS.claim] <= 5_000
    assert 5_000 < lives[KEYS.member("router-a")] <= 10_000
    assert lives[KEYS.token] == -1


async def test_restarts_leave_no_keys_behind_and_the_stream_stays_short(stores: RedisStores, admin: Redis) -> None:
    for life in range(700):
        mine = await granted(stores.lease, candidate(incarnation=f"life-{life}"))
        await stores.lease.release(mine, successor=None)
    assert len(await admin.keys("*")) == 4
    assert await admin.xlen(KEYS.events) < EVENTS_MAX + 200


async def test_a_router_that_went_silent_is_no_member_and_leaves_the_index(stores: RedisStores, admin: Redis) -> None:
    await admin.zadd(KEYS.members, {"router-gone": 1_000})
    assert list(await stores.lease.members()) == []
    await stores.lease.announce(member("router-a"))
    assert await admin.zrange(KEYS.members, 0, -1) == ["router-a"]
    await admin.delete(KEYS.member("router-a"))
    assert list(await stores.lease.members()) == []


async def test_a_lost_script_cache_costs_nothing_but_a_resend(stores: RedisStores, admin: Redis) -> None:
    mine = await granted(stores.lease, candidate())
    for _ in range(3):
        await admin.script_flush()
        assert await stores.lease.renew(mine) == Renewed(None)
        await admin.script_flush()
        assert (await stores.lease.observe()).record == mine
    assert set(await admin.script_exists(*(script.sha for script in (scripts.OBSERVE,)))) == {True}


async def test_each_purpose_has_a_named_connection_of_its_own(stores: RedisStores, admin: Redis) -> None:
    await stores.lease.observe()
    await stores.handoff.get()
    await stores.lease.wait_for_event(timeout_s=0.01)
    clients: Any = await admin.client_list()
    names = sorted(client["name"] for client in clients if client["name"])
    assert names == ["router-a-control", "router-a-lease", "router-a-tail"]


async def test_a_blocked_wait_delays_no_other_purpose(stores: RedisStores) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(stores.lease.wait_for_event(timeout_s=60))
        await asyncio.sleep(0.05)
        assert (await stores.lease.observe()).record is None
        assert not waiting.done()
        await granted(stores.lease, candidate())


async def test_a_silent_stream_costs_no_reconnection(stores: RedisStores, admin: Redis) -> None:
    """Redis-py's own read time-out, or ours, must never end a read that merely has nothing to say."""
    await stores.lease.wait_for_event(timeout_s=0.01)
    before = await _connections_received(admin)
    for timeout_s in (1.3, 0.1, 0.1, 0.1):
        await stores.lease.wait_for_event(timeout_s=timeout_s)
    assert await _connections_received(admin) == before


async def _connections_received(admin: Redis) -> int:
    stats: Any = await admin.info("stats")
    return int(stats["total_connections_received"])


async def test_a_trimmed_stream_hides_no_event(stores: RedisStores, admin: Redis) -> None:
    mine = await granted(stores.lease, candidate())
    await stores.lease.wait_for_event(timeout_s=10)
    await admin.xtrim(KEYS.events, maxlen=0)
    async with asyncio.timeout(20):
        await stores.lease.wait_for_event(timeout_s=60)
        await stores.lease.release(mine, successor=None)
        await stores.lease.wait_for_event(timeout_s=60)


async def test_a_stream_that_starts_anew_with_lower_ids_is_heard(stores: RedisStores, admin: Redis) -> None:
    await admin.xadd(KEYS.events, {"type": "acquire"}, id="9999999999999-0")
    await stores.lease.wait_for_event(timeout_s=10)
    await admin.delete(KEYS.events)
    await granted(stores.lease, candidate())
    async with asyncio.timeout(20):
        await stores.lease.wait_for_event(timeout_s=60)


async def test_a_foreign_value_is_named_with_its_key_and_what_to_do(stores: RedisStores, admin: Redis) -> None:
    for key in ("lease", "claim", "release"):
        for foreign in ("hello", "{}", "[1]", '{"v":99,"process":{}}', b"\xff\xfe"):
            await admin.set(KEYS.prefix + key, foreign)
            with pytest.raises(StoreMisused, match=rf"narwhal:{{prod}}:{key}.*redis-cli get"):
                await stores.lease.observe()
        await admin.delete(KEYS.prefix + key)


async def test_a_key_of_another_type_is_named_with_what_to_do(stores: RedisStores, admin: Redis) -> None:
    await admin.lpush(KEYS.token, "x")
    with pytest.raises(StoreMisused, match=r"ACQUIRE.*WRONGTYPE.*ha\.cluster"):
        await stores.lease.acquire(candidate(), floor=NONE, epoch=None)
    await admin.set(KEYS.token, "ninety")
    with pytest.raises(StoreMisused, match="number"):
        await stores.lease.observe()


async def test_tokens_never_pass_what_a_script_can_count(stores: RedisStores, admin: Redis) -> None:
    await admin.set(KEYS.token, 2**53 - 1)
    with pytest.raises(StoreMisused, match=str(2**53 - 1)):
        await stores.lease.acquire(candidate(), floor=NONE, epoch=None)
    assert await admin.get(KEYS.lease) is None


async def test_an_edited_document_is_rejected(stores: RedisStores, admin: Redis) -> None:
    mine = await granted(stores.lease, candidate())
    await stores.handoff.put(handoff(mine.token, 1))
    await admin.hset(KEYS.handoff, "doc", handoff(mine.token, 1, mark=1).encode())
    with pytest.raises(HandoffRejected, match="edited by hand"):
        await stores.handoff.get()


async def test_a_lease_made_permanent_counts_as_freshly_renewed(stores: RedisStores, admin: Redis) -> None:
    await granted(stores.lease, candidate(ttl_ms=7_000))
    await admin.persist(KEYS.lease)
    assert (await stores.lease.observe()).pttl_ms == 7_000


async def test_a_cancelled_command_never_leaves_its_answer_to_the_next(own_redis: RedisServer) -> None:
    """Behind a path that delays answers, commands are cut at every moment of their life."""
    dice = random.Random(5)
    async with faulty_path(own_redis.port) as path, opened(path.url) as stores:
        mine = await granted(stores.lease, candidate())
        path.delay_s = 0.02
        for _ in range(40):
            command = asyncio.create_task(dice.choice([_renew, _members])(stores, mine))
            await asyncio.sleep(dice.uniform(0, 0.05))
            command.cancel()
            await asyncio.gather(command, return_exceptions=True)
            assert (await stores.lease.observe()).record == mine
            assert list(await stores.lease.members()) == []
        assert await stores.lease.renew(mine) == Renewed(None)


async def _renew(stores: RedisStores, mine: Any) -> None:
    assert await stores.lease.renew(mine) == Renewed(None)


async def _members(stores: RedisStores, mine: Any) -> None:
    assert list(await stores.lease.members()) == []


async def test_a_lost_answer_to_acquire_is_repaired_as_ours(own_redis: RedisServer, admin: Redis) -> None:
    async with faulty_path(own_redis.port) as path, opened(path.url, op_timeout_s=1.0) as stores:
        refused = await stores.lease.acquire(candidate(), floor=NONE, epoch="another")
        assert isinstance(refused, DataLost), "the script is known, so the next answer is the grant"
        path.lose_next_answer()
        with pytest.raises(StoreUnavailable, match=r"ACQUIRE.*no answer within 1 s"):
            await stores.lease.acquire(candidate(), floor=NONE, epoch=None)
        assert path.lost.is_set()
        token = int(await admin.get(KEYS.token) or 0)
        assert token, "the command got through"
        answer = await stores.lease.acquire(candidate(), floor=NONE, epoch=None)
        assert answer == Granted(candidate().with_token(FencingToken(token)), fresh=False)
        assert await admin.xlen(KEYS.events) == 1, "one grant, one token"


async def test_a_lost_answer_to_a_handoff_is_repaired_without_another_write(
    own_redis: RedisServer, admin: Redis
) -> None:
    async with faulty_path(own_redis.port) as path, opened(path.url, op_timeout_s=1.0) as stores:
        mine = await granted(stores.lease, candidate())
        await stores.handoff.put(handoff(mine.token, 3))
        path.lose_next_answer()
        with pytest.raises(StoreUnavailable, match="PUT_HANDOFF"):
            await stores.handoff.put(handoff(mine.token, 4))
        assert path.lost.is_set()
        assert await admin.hget(KEYS.handoff, "ver") == "4", "the command got through"
        await stores.handoff.put(handoff(mine.token, 4))
        assert await stores.handoff.get() == handoff(mine.token, 4)
        assert await admin.xlen(KEYS.events) == 3, "acquire, and each handoff once"
        await stores.handoff.put(handoff(mine.token, 5))


async def test_a_lost_answer_is_never_asked_for_again_behind_our_back(own_redis: RedisServer) -> None:
    async with faulty_path(own_redis.port) as path, opened(path.url, op_timeout_s=1.0) as stores:
        await stores.lease.observe()
        path.lose_next_answer()
        with pytest.raises(StoreUnavailable):
            await stores.lease.observe()
        assert path.connections == 1, "no retry inside the client library"
        await stores.lease.observe()
        assert path.connections == 2


def test_the_template_is_split_at_the_token_alone() -> None:
    head, tail = around_token(candidate('x"token":0', incarnation='\\"token":0,"token":0'))
    for token in (1, 2**53 - 1):
        record = candidate('x"token":0', incarnation='\\"token":0,"token":0').with_token(FencingToken(token))
        assert f"{head}{token}{tail}" == record.encode()


async def test_a_unix_socket_and_a_chosen_database_serve_as_well() -> None:
    """The folder is short: a socket's path may have about a hundred characters only."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        RedisServer.start(options=("--unixsocket", f"{folder}/socket")) as server,
    ):
        async with opened(f"unix://{folder}/socket?db=3") as stores:
            mine = await granted(stores.lease, candidate())
        async with aclosing(Redis(port=server.port, db=3, protocol=2, decode_responses=True)) as client:
            assert await client.get(KEYS.lease) == mine.encode()


async def test_tls_serves_as_well(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    await _self_signed(key, certificate)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
    options = ("--tls-port", port, "--tls-auth-clients", "no", *files)
    with RedisServer.start(installed("redis-server"), options=[str(word) for word in options]):
        async with opened(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}") as stores:
            await granted(stores.lease, candidate())
        async with opened(f"rediss://127.0.0.1:{port}/0") as stores:
            with pytest.raises(StoreUnavailable, match="certificate"):
                await stores.lease.observe()


async def _self_signed(key: Path, certificate: Path) -> None:
    made = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await made.wait() == 0


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://127.0.0.1:6379", "redis://, rediss:// or unix://"),
        ("redis://:secret@127.0.0.1:6379", "NARWHAL_REDIS_PASSWORD"),
        ("redis://127.0.0.1:6379/0?password=secret", "password"),
        ("redis://127.0.0.1:6379/0?socket_timeout=50", "socket_timeout"),
        ("redis://127.0.0.1:6379/zero", "number of the database"),
        ("unix://", "path of the socket"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"ha\.redis_url") as refused:
        open_redis(HaSection.model_construct(**{**dict(HaSection()), "redis_url": url}), client_name="router-a")
    assert complaint in str(refused.value)
    assert "secret" not in str(refused.value)
