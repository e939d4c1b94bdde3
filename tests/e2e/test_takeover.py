"""The pair survives what happens to its active router: killed, stopped gently, frozen, cut off from Redis."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
from openai import OpenAIError

from narwhal.demo.evidence import not_carried, overlap_ms, read_admissions, terms
from tests.e2e.running import LEASE_TTL_S, Router, RunningDemo, narwhal, wait_until

SLACK_S = 3.0
"""On top of a lease: two busy cores, and a Python process that starts."""


@pytest.fixture(autouse=True)
def nobody_admits_twice(demo: RunningDemo) -> object:
    """Whatever a test does to the pair, no two terms may admit at once, by the routers' own record."""
    yield
    found = terms(read_admissions({name: router.log for name, router in demo.routers.items()}))
    assert overlap_ms(found) == 0, found
    tokens = [term.token for term in sorted(found, key=lambda term: term.first)]
    assert tokens == sorted(tokens)


def serves(demo: RunningDemo, router: Router) -> bool:
    """Whether a request is answered through `router` right now."""
    try:
        with demo.client(router, timeout_s=2.0) as client:
            answer = client.completions.create(model="stub", prompt="x", max_tokens=1)
    except OpenAIError:
        return False
    return len(answer.choices) == 1


def start_of_stream(demo: RunningDemo, *, tokens: int, finished: list[str | None]) -> threading.Thread:
    """Begin a stream at the active router and return once its first token came; `finished` gets how it ended."""
    begun = threading.Event()

    def read() -> None:
        try:
            with demo.client(timeout_s=30.0) as client:
                stream = client.completions.create(model="stub", prompt="x", max_tokens=tokens, stream=True)
                reasons = []
                for chunk in stream:
                    begun.set()
                    reasons += [choice.finish_reason for choice in chunk.choices]
            finished.append(reasons[-1])
        except OpenAIError as error:
            finished.append(type(error).__name__)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(10)
    return thread


def test_a_killed_active_is_followed_within_a_lease_and_comes_back_as_standby(demo: RunningDemo) -> None:
    before, token = demo.active(), demo.token()
    after = demo.other(before)
    killed_at = time.perf_counter()
    os.kill(demo.pid(), signal.SIGKILL)
    wait_until(lambda: serves(demo, after), f"{after.id} serves")
    assert time.perf_counter() - killed_at < LEASE_TTL_S + SLACK_S
    assert demo.token() > token
    wait_until(before.warm, f"{before.id} stands by", within_s=60)
    assert demo.active() == after


def test_drains_and_ejections_survive_the_kill_and_healed_engines_return(demo: RunningDemo) -> None:
    before = demo.active()
    after = demo.other(before)
    assert narwhal("engines", "drain", "prefill-2", "--reason", "test", "--config", demo.config).returncode == 0
    demo.break_health("decode-2")

    def marked(router: Router) -> bool:
        engines = router.engines()
        return (engines["prefill-2"]["state"], engines["decode-2"]["state"]) == ("operator_drain", "ejected")

    wait_until(lambda: marked(before), "the active has both out")
    wait_until(lambda: marked(after), "the standby has followed")
    known, known_at = {name: before.engines()[name] for name in ("prefill-2", "decode-2")}, time.perf_counter()
    os.kill(demo.pid(), signal.SIGKILL)
    wait_until(lambda: serves(demo, after), f"{after.id} serves")
    assert not_carried(known, after.engines(), elapsed_s=time.perf_counter() - known_at) == []

    demo.heal("decode-2")
    wait_until(lambda: after.engines()["decode-2"]["state"] == "eligible", "the healed engine is readmitted")
    assert after.engines()["prefill-2"]["state"] == "operator_drain"
    assert narwhal("engines", "undrain", "prefill-2", "--config", demo.config).returncode == 0
    assert after.engines()["prefill-2"]["state"] == "eligible"


def test_sigterm_hands_over_at_once_and_lets_streams_finish(demo: RunningDemo) -> None:
    before, token = demo.active(), demo.token()
    after = demo.other(before)
    finished: list[str | None] = []
    reading = start_of_stream(demo, tokens=150, finished=finished)
    pid = demo.pid()
    told_at = time.perf_counter()
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: serves(demo, after), f"{after.id} serves")
    gap_s = time.perf_counter() - told_at
    assert gap_s < LEASE_TTL_S, "a release must not cost a lease"
    assert demo.token() > token
    reading.join(30)
    assert finished == ["length"]
    wait_until(lambda: f"(process {pid}) ended: exit code 0" in demo.said, "the stopped router ends cleanly")


def test_a_frozen_active_is_replaced_and_admits_nothing_when_it_wakes(demo: RunningDemo) -> None:
    before, token, pid = demo.active(), demo.token(), demo.pid()
    after = demo.other(before)
    assert serves(demo, before)
    os.kill(pid, signal.SIGSTOP)
    try:
        queued = [post_into(before) for _ in range(20)]
        wait_until(lambda: serves(demo, after), f"{after.id} serves")
        assert demo.token() > token
        frozen_for_at_least_s = LEASE_TTL_S * 2
        woken_at = time.perf_counter() + frozen_for_at_least_s
        wait_until(lambda: time.perf_counter() >= woken_at, "twice a lease has passed")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert {status_of(one) for one in queued} == {503}
    wait_until(before.warm, f"{before.id} stands by")
    assert (demo.active(), after.ready()[0]) == (after, 200)
    assert demo.token() > token
    late = [event for event in before.events() if event["event"] == "lease_lost" and event["fencing_token"] == token]
    assert late, "the woken router did not fence itself"


def post_into(router: Router) -> socket.socket:
    """Send a whole request into the router's socket without waiting for an answer."""
    parts = urlsplit(router.url)
    body = json.dumps({"model": "stub", "prompt": "x", "max_tokens": 1}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((parts.hostname, parts.port), timeout=15)
    connection.sendall(head.encode() + body)
    return connection


def status_of(connection: socket.socket) -> int:
    """The status of the answer that comes at last."""
    with connection:
        answer = connection.recv(65536)
    return int(answer.split(b" ", 2)[1])


def test_kill_active_names_the_successor_and_both_gaps(demo: RunningDemo) -> None:
    before, token, pid = demo.active(), demo.token(), demo.pid()
    done = narwhal("ha", "kill-active", "--json", "--config", demo.config)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["holder"] == {**document["holder"], "router": before.id, "fencing_token": token, "pid": pid}
    assert document["successor"]["router"] == demo.other(before).id
    assert document["successor"]["fencing_token"] > token
    assert 0 < document["lease_gap_ms"] <= document["ready_gap_ms"] < (LEASE_TTL_S + SLACK_S) * 1000


def test_status_is_healthy_with_a_whole_pair_and_not_without_a_standby(demo: RunningDemo) -> None:
    assert narwhal("ha", "status", "--config", demo.config).returncode == 0
    os.kill(demo.pid(), signal.SIGKILL)
    done = narwhal("ha", "status", "--json", "--config", demo.config)
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"]


def nobody_holds(demo: RunningDemo) -> bool:
    """Whether every router says that it is not the active one, whatever else ails it."""
    return all(reason.startswith(("fenced", "standby")) for _, reason in (r.ready() for r in demo.routers.values()))


def test_without_redis_nobody_admits_and_with_it_one_router_serves_again(demo: RunningDemo) -> None:
    token, pids = demo.token(), {name: router.events() for name, router in demo.routers.items()}
    os.kill(demo.document["redis_pid"], signal.SIGSTOP)
    try:
        wait_until(lambda: nobody_holds(demo), "nobody believes in a lease", within_s=10)
        assert not any(serves(demo, router) for router in demo.routers.values())
    finally:
        os.kill(demo.document["redis_pid"], signal.SIGCONT)
    wait_until(demo.whole, "the pair is whole again")
    assert demo.token() > token
    started = [
        event
        for name, router in demo.routers.items()
        for event in router.events()[len(pids[name]) :]
        if event["event"] == "router_listening"
    ]
    assert started == [], "a router was started again: it must not end for want of Redis"
