"""A running demo, seen and handled from outside as people do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import redis
from openai import OpenAI

NARWHAL = (sys.executable, "-m", "narwhal")
LEASE_TTL_S = 2.0


def wait_until(
    condition: Callable[[], bool], what: str, *, within_s: float = 30.0, else_say: Callable[[], str] = str
) -> float:
    """Return the seconds that it took until `condition` held; `else_say` tells how things stand when it did not."""
    began = time.perf_counter()
    while not condition():
        assert time.perf_counter() - began < within_s, f"not within {within_s} s: {what}; {else_say()}"
        time.sleep(0.02)
    return time.perf_counter() - began


def ask(url: str, *, body: Any = None, timeout_s: float = 2.0) -> tuple[int, Any]:
    """Return status and document of a GET, or of a POST with `body`; 0 and None without an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")
    except (OSError, ValueError):
        return 0, None


def narwhal(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run `narwhal` with `words` to its end."""
    return subprocess.run([*NARWHAL, *words], capture_output=True, text=True, timeout=timeout_s, check=False)


def base_port() -> int:
    """The first port that a demo of this test process should try; others have other ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 10_000 + 500 * worker


def alive(pid: int) -> bool:
    """Whether a process runs that is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


@dataclass(frozen=True, slots=True)
class Router:
    """One router of the demo; its process changes when it is started again."""

    id: str
    url: str
    admin_url: str
    config: str
    log: Path

    def ready(self) -> tuple[int, str]:
        """Status and reason of /ready; 0 without an answer."""
        status, document = ask(f"{self.url}/ready", timeout_s=1.0)
        return status, str((document or {}).get("reason", ""))

    def warm(self) -> bool:
        return self.ready() == (503, "standby")

    def engines(self) -> dict[str, dict[str, Any]]:
        """The engines as this router's control plane has them."""
        status, document = ask(f"{self.admin_url}/admin/engines")
        assert status == 200, document
        return {engine["id"]: engine for engine in document["engines"]}

    def events(self) -> list[dict[str, Any]]:
        """What the router has logged, over all its lives."""
        found = []
        for line in self.log.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


class RunningDemo:
    """`narwhal demo --json` as a process of its own."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the demo did not come up: {errors.read_text()}"
        self.document: dict[str, Any] = json.loads(line)
        self.folder = Path(self.document["folder"])
        self.config = str(self.document["routers"][0]["config"])
        self.routers = {
            one["id"]: Router(one["id"], one["url"], one["admin_url"], one["config"], Path(one["log"]))
            for one in self.document["routers"]
        }
        self.redis = redis.Redis.from_url(self.document["redis"], socket_timeout=5, decode_responses=True)

    @property
    def said(self) -> str:
        """What it told people so far."""
        return self._errors.read_text()

    def lease(self) -> dict[str, Any] | None:
        text = self.redis.get("narwhal:{demo}:lease")
        return dict(json.loads(str(text))) if text else None

    def active(self) -> Router:
        """The router that holds the lease."""
        lease = self.lease()
        assert lease is not None, "nobody holds the lease"
        return self.routers[lease["router"]]

    def other(self, router: Router) -> Router:
        return next(one for one in self.routers.values() if one.id != router.id)

    def token(self) -> int:
        lease = self.lease()
        assert lease is not None, "nobody holds the lease"
        return int(lease["token"])

    def pid(self) -> int:
        """The process of the active router."""
        lease = self.lease()
        assert lease is not None, "nobody holds the lease"
        return int(lease["process"]["pid"])

    def whole(self) -> bool:
        """Whether one router serves and the other could follow it."""
        readiness = [router.ready() for router in self.routers.values()]
        return sorted(readiness) == [(200, "active"), (503, "standby")] and self.lease() is not None

    def standing(self) -> str:
        """How things stand, for the message of a test that failed."""
        ready = {name: router.ready() for name, router in self.routers.items()}
        ends = "\n".join(
            "\n".join(json.dumps(event) for event in router.events()[-8:]) for router in self.routers.values()
        )
        return f"/ready: {ready}; lease: {self.lease()}; said:\n{self.said[-1500:]}\nlogs end with:\n{ends}"

    def engine(self, name: str) -> dict[str, Any]:
        return next(one for one in self.document["engines"] if one["id"] == name)

    def break_health(self, name: str) -> None:
        fault = {"kind": "status", "leg": "health", "status": 500}
        assert ask(f"{self.engine(name)['admin_url']}/stub/faults", body=fault)[0] == 200

    def heal(self, name: str) -> None:
        assert ask(f"{self.engine(name)['admin_url']}/stub/faults", body=[])[0] == 200

    def client(self, router: Router | None = None, *, timeout_s: float = 10.0) -> OpenAI:
        """The official client at one router, the active one by default, without repeating anything."""
        url = (router or self.active()).url
        return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s)

    def pids(self) -> list[int]:
        """Every process that it has told of."""
        parts = [*self.document["routers"], *self.document["engines"]]
        return [self.document["redis_pid"], *(part["pid"] for part in parts)]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End it and return its exit code."""
        self.redis.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


@contextmanager
def running_demo(folder: Path, *words: str) -> Iterator[RunningDemo]:
    """Give a demo that is whole, ended afterwards."""
    errors = folder / "demo.stderr"
    with open(errors, "w") as stderr:
        process = subprocess.Popen(
            [*NARWHAL, "demo", "--json", "--ports-from", str(base_port()), *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        demo = RunningDemo(process, errors)
    except BaseException:
        process.terminate()
        process.wait(timeout=30)
        raise
    try:
        yield demo
    finally:
        demo.stop()
