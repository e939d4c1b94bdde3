"""What the container tests share: whether a Docker engine answers here, and the image that they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# The helper container that cleans up after testcontainers is an image to be pulled; these tests clean up themselves.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """Skip unless a Docker engine answers."""
    if shutil.which("docker") is None:
        pytest.skip("needs Docker: there is no `docker` on PATH")
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode != 0:
        pytest.skip(f"needs a Docker engine: {asked.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="session")
def compose_command(docker_engine: None) -> list[str]:
    """The plugin where there is one, else the program; skip without either."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose or the compose plugin of docker")
    return ["docker-compose"]


@pytest.fixture(scope="session")
def narwhal_image(compose_command: list[str]) -> Iterator[str]:
    """The tag of an image built from this tree as docker-compose.yml says, removed afterwards."""
    tag = f"narwhal-ha-test:{uuid.uuid4().hex[:12]}"
    environ = {**os.environ, "NARWHAL_IMAGE": tag}
    done = subprocess.run(
        [*compose_command, "build", "router-a"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    yield tag
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, timeout=60, check=False)
