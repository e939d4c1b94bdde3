"""The images by themselves: what runs in them, as whom, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from testcontainers.core.container import DockerContainer

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@contextmanager
def running(container: DockerContainer) -> Iterator[DockerContainer]:
    container.start()
    try:
        yield container
    finally:
        container.stop()


def wait_for_health(url: str, *, within_s: float) -> None:
    deadline = time.perf_counter() + within_s
    while True:
        try:
            with urlopen(f"{url}/health", timeout=2) as answer:
                assert answer.status == 200
            return
        except OSError:
            assert time.perf_counter() < deadline, f"{url}/health did not answer within {within_s} s"
            time.sleep(0.1)


def stub_engine(image: str) -> DockerContainer:
    command = "narwhal stub-engine --role decode --host 0.0.0.0 --port 8000 --advertise-url http://decode:8000"
    return DockerContainer(image).with_command(command).with_exposed_ports(8000).with_kwargs(init=True)


def test_the_image_runs_without_root_and_without_pip(narwhal_image: str) -> None:
    with running(stub_engine(narwhal_image)) as container:
        assert container.exec(["id", "-u"]).output.decode().strip() == "10001"
        assert container.exec(["python", "-c", "import pip"]).exit_code != 0


def test_an_engine_ends_on_sigterm_without_being_killed(narwhal_image: str) -> None:
    with running(stub_engine(narwhal_image)) as container:
        wait_for_health(f"http://127.0.0.1:{container.get_exposed_port(8000)}", within_s=30)
        inner = container.get_wrapped_container()
        inner.stop(timeout=15)
        inner.reload()
        assert inner.attrs["State"]["ExitCode"] == 0


def test_haproxy_accepts_its_configuration(docker_engine: None) -> None:
    check = DockerContainer("haproxy:2.6-bookworm").with_command(
        ["sh", "-c", "haproxy -c -f /usr/local/etc/haproxy/haproxy.cfg; echo checked $?"]
    )
    check = check.with_volume_mapping(str(ROOT / "ops" / "haproxy.cfg"), "/usr/local/etc/haproxy/haproxy.cfg", "ro")
    with running(check) as container:
        container.get_wrapped_container().wait(timeout=30)
        output, errors = container.get_logs()
        assert "checked 0" in output.decode(), errors.decode()
