"""The pair as people run it: docker-compose.yml, HAProxy in front, the official client through one address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import redis
from openai import OpenAI, OpenAIError

ROOT = Path(__file__).resolve().parent.parent.parent
LEASE_TTL_S = 2.0
ROUTERS = ("router-a", "router-b")

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


class Pair:
    """One project of docker-compose.yml on ports of its own."""

    def __init__(self, command: list[str], image: str) -> None:
        self.project = f"narwhal-test-{uuid.uuid4().hex[:8]}"
        self._command = [*command, "--project-name", self.project]
        self.port, self.redis_port, *self.admin_ports = free_ports(4)
        self._environ = {
            **os.environ,
            "NARWHAL_IMAGE": image,
            "NARWHAL_PORT": str(self.port),
            "NARWHAL_REDIS_PORT": str(self.redis_port),
            "NARWHAL_ADMIN_A_PORT": str(self.admin_ports[0]),
            "NARWHAL_ADMIN_B_PORT": str(self.admin_ports[1]),
        }
        self.url = f"http://127.0.0.1:{self.port}"

    def compose(self, *words: str, timeout_s: float = 120, check: bool = True) -> str:
        done = subprocess.run(
            [*self._command, *words],
            cwd=ROOT,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def container_id(self, service: str) -> str:
        """The id of the container of `service`, asked of the engine, which answers much faster than compose."""
        labels = {"project": self.project, "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return docker("ps", "--all", "--quiet", *filters).strip()

    def container(self, service: str) -> dict[str, Any]:
        """What the engine says of the container of `service`."""
        (described,) = json.loads(docker("inspect", self.container_id(service)))
        return dict(described)

    def client(self, *, timeout_s: float = 10.0) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout_s)

    def lease(self) -> dict[str, Any] | None:
        with redis.Redis(port=self.redis_port, socket_timeout=2, decode_responses=True) as connection:
            text = connection.get("narwhal:{compose}:lease")
        return dict(json.loads(str(text))) if text else None

    def holder(self) -> str:
        lease = self.lease()
        assert lease is not None
        return str(lease["router"])

    def token(self) -> int:
        lease = self.lease()
        assert lease is not None
        return int(lease["token"])

    def ready(self) -> bool:
        return get(f"{self.url}/ready") is not None

    def whole(self) -> bool:
        """Whether the active's address answers, and the other router could take over."""
        states = [get(f"http://127.0.0.1:{port}/admin/status") or {} for port in self.admin_ports]
        reasons = sorted((str(state.get("role")), str(state.get("reason"))) for state in states)
        return self.ready() and reasons == [("active", "active"), ("standby", "standby")]


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def get(url: str) -> dict[str, Any] | None:
    """The JSON document that `url` answers with 200, None for any other answer or none."""
    try:
        with urlopen(url, timeout=2) as answer:
            return dict(json.load(answer))
    except HTTPError as error:
        error.close()
    except OSError:
        pass
    return None


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def wait_until(condition: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Return the seconds that it took until `condition` held."""
    started = time.perf_counter()
    while not condition():
        assert time.perf_counter() - started < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.05)
    return time.perf_counter() - started


@pytest.fixture(scope="module")
def project(compose_command: list[str], narwhal_image: str) -> Iterator[Pair]:
    pair = Pair(compose_command, narwhal_image)
    try:
        pair.compose("up", "--detach", "--build", timeout_s=540)
        yield pair
    finally:
        pair.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


@pytest.fixture
def pair(project: Pair) -> Pair:
    """The pair with both routers up and one of them serving, whatever the test before did."""
    if not project.whole():
        project.compose("up", "--detach")
        wait_until(project.whole, within_s=60, what="one router serves and the other could take over")
    return project


def answered(client: OpenAI) -> bool:
    try:
        answer = client.chat.completions.create(
            model="stub-model", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
    except OpenAIError:
        return False
    return answer.choices[0].finish_reason is not None


def test_the_official_client_streams_chat_through_haproxy(pair: Pair) -> None:
    with pair.client() as client:
        stream = client.chat.completions.create(
            model="stub-model", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] is not None


def test_the_pair_serves_within_ttl_and_two_seconds_after_its_active_was_killed(pair: Pair) -> None:
    before, token_before = pair.holder(), pair.token()
    container = pair.container_id(before)
    killed_at = time.perf_counter()
    docker("kill", container)
    with pair.client(timeout_s=1.0) as client:
        wait_until(lambda: answered(client), within_s=10, what="a request is served again")
    gap_s = time.perf_counter() - killed_at
    assert pair.holder() != before
    assert pair.token() > token_before
    assert gap_s <= LEASE_TTL_S + 2


def test_a_router_that_was_killed_comes_back_as_standby(pair: Pair) -> None:
    before = pair.holder()
    pair.compose("kill", before)
    wait_until(pair.ready, within_s=10, what="the other router serves")
    after, token_after = pair.holder(), pair.token()
    pair.compose("up", "--detach")
    wait_until(pair.whole, within_s=60, what="the killed router is a member again")
    assert (pair.holder(), pair.token()) == (after, token_after)


def test_stopping_the_active_hands_over_and_ends_cleanly(pair: Pair) -> None:
    before, token_before = pair.holder(), pair.token()
    pair.compose("stop", before)
    wait_until(pair.ready, within_s=5, what="the other router serves")
    assert pair.holder() != before
    assert pair.token() > token_before
    assert pair.container(before)["State"]["ExitCode"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the process in the container belongs to another user")
def test_kill_active_reaches_the_process_in_its_container_from_the_host(pair: Pair) -> None:
    before, token_before = pair.holder(), pair.token()
    cluster = ["--redis", f"redis://127.0.0.1:{pair.redis_port}", "--cluster", "compose"]
    done = subprocess.run(
        [sys.executable, "-m", "narwhal", "ha", "kill-active", *cluster, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["holder"]["router"], report["holder"]["fencing_token"]) == (before, token_before)
    assert report["successor"]["fencing_token"] > token_before
    wait_until(pair.whole, within_s=60, what="the killed router is restarted by the engine and follows")


def test_the_status_command_in_a_container_finds_the_pair_by_itself(pair: Pair) -> None:
    status = json.loads(pair.compose("exec", "-T", "router-a", "narwhal", "ha", "status", "--json"))
    assert {router["router"]: router["role"] for router in status["routers"]} == {
        name: "active" if name == pair.holder() else "standby" for name in ROUTERS
    }


def test_a_restart_of_redis_keeps_the_token(pair: Pair) -> None:
    token_before = pair.token()
    pair.compose("restart", "redis")
    wait_until(lambda: pair.whole() and pair.lease() is not None, within_s=30, what="the pair serves again")
    assert pair.token() >= token_before


def test_both_routers_are_healthy_though_only_one_is_ready(pair: Pair) -> None:
    def healthy() -> bool:
        return all(pair.container(name)["State"]["Health"]["Status"] == "healthy" for name in ROUTERS)

    wait_until(healthy, within_s=30, what="both routers report healthy")


def test_everything_is_published_on_loopback_only(pair: Pair) -> None:
    published = [
        binding["HostIp"]
        for service in ("redis", "haproxy", *ROUTERS, "prefill-1", "decode-1")
        for bindings in pair.container(service)["NetworkSettings"]["Ports"].values()
        for binding in bindings or ()
    ]
    assert len(published) == 4
    assert set(published) == {"127.0.0.1"}
