"""Real engines as these tests reach them: over HTTP, and through the scripts that start and stop them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

ENGINES_VARIABLE: Final = "NARWHAL_REAL_ENGINES"
TOOLS_VARIABLE: Final = "NARWHAL_REAL_TOOLS"
STATE_VARIABLE: Final = "VLLM_DIR"
MODEL: Final = "tiny"
OF_THE_TOOLS: Final = "prefill=http://127.0.0.1:18101,decode=http://127.0.0.1:18102"
"""Where up.sh starts p1 and d1."""

KV_RECEIVED: Final = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
COMPUTED: Final = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
FAILED_TRANSFERS: Final = "vllm:nixl_num_failed_transfers_total"
RUNNING: Final = "vllm:num_requests_running"

ANSWER_S: Final = 20.0
"""How long an engine may take for a small question; the machine may be very busy."""
WARM_UP_S: Final = 60.0
"""The first exchange of a new pair includes the handshake of its KV connector, which can stall."""
START_TRIES: Final = 2
START_S: Final = 240.0

Document = dict[str, Any]


class NoEngines(Exception):
    """There are no real engines here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class RealEngine:
    """One engine. `name` is what the scripts call it: p1, p2, d1, d2, in the order of the list."""

    name: str
    role: str
    url: str

    async def healthy(self, *, timeout_s: float = ANSWER_S) -> bool:
        """Whether /health says 200."""
        try:
            async with _session(timeout_s) as session, session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def metric(self, wanted: str) -> float:
        """Return the sum of the samples that `wanted` names, e.g. `a_total{source="x"}`, whatever other labels say."""
        name, _, label = wanted.removesuffix("}").partition("{")
        async with _session(ANSWER_S) as session, session.get(f"{self.url}/metrics") as answer:
            page = await answer.text()
        samples = re.findall(rf"^{re.escape(name)}(?:\{{([^}}\n]*)\}})? (\S+)$", page, re.MULTILINE)
        assert samples, f"{self.name} has no metric {name}"
        return sum(float(value) for labels, value in samples if label in labels)

    async def ask(self, path: str, body: Mapping[str, Any], *, timeout_s: float = ANSWER_S) -> Document:
        """Return the answer of a request that goes to this engine alone."""
        async with _session(timeout_s) as session, session.post(f"{self.url}{path}", json=body) as answer:
            document = await answer.json()
            assert answer.status == 200, document
            return dict(document)

    async def command(self, path: str) -> int:
        """Send one of the engine's own development commands, e.g. `/pause?mode=keep`; return the status."""
        async with _session(ANSWER_S) as session, session.post(f"{self.url}{path}") as answer:
            return answer.status


class Tools:
    """The scripts `up.sh NAME ...` and `down.sh NAME ...`, and the process ids that they keep in run/NAME.pid."""

    def __init__(self, folder: Path, state: Path) -> None:
        self._folder = folder
        self._state = state

    def start(self, *names: str) -> None:
        """Return when the engines are healthy; those that run already are left alone. Raises NoEngines."""
        said = ""
        for _ in range(START_TRIES):
            done = self._run("up.sh", names)
            if done.returncode == 0:
                return
            said = (done.stderr + done.stdout).strip()
        raise NoEngines(f"up.sh {' '.join(names)} failed: {said[-300:]}")

    def stop(self, *names: str) -> None:
        """End the engines and everything that belongs to them."""
        self._run("down.sh", names)

    def kill(self, name: str) -> None:
        """End every process of an engine at once, as a crash of its host would."""
        self._run("down.sh", [name], KILL="1")

    def signal_all(self, name: str, number: signal.Signals) -> None:
        """Send `number` to every process of an engine."""
        os.killpg(self._leader(name), number)

    def signal_core(self, name: str, number: signal.Signals) -> None:
        """Send `number` to every process of an engine but the one that answers HTTP."""
        leader = self._leader(name)
        members = [pid for pid in _processes() if pid != leader and _group(pid) == leader]
        assert members, f"{name} has no processes beside its server"
        for pid in members:
            os.kill(pid, number)

    def _leader(self, name: str) -> int:
        return int((self._state / "run" / f"{name}.pid").read_text())

    def _run(self, script: str, names: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self._folder / script), *names],
            env={**os.environ, STATE_VARIABLE: str(self._state), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S * max(1, len(names)),
            check=False,
        )


def engines_from(environ: Mapping[str, str]) -> tuple[RealEngine, ...]:
    """Return the engines that NARWHAL_REAL_ENGINES lists, else those that the tools start. Raises NoEngines."""
    text = environ.get(ENGINES_VARIABLE, "").strip()
    if not text and tools_from(environ) is not None:
        text = OF_THE_TOOLS
    if not text:
        raise NoEngines(f"needs real engines: set {ENGINES_VARIABLE} or {TOOLS_VARIABLE} (docs/real-engines.md)")
    counts = {"prefill": 0, "decode": 0}
    engines = []
    for entry in text.split(","):
        role, _, url = entry.strip().partition("=")
        if role not in counts or not url.startswith("http://"):
            raise ValueError(f"{ENGINES_VARIABLE}: {entry!r} is neither prefill=http://... nor decode=http://...")
        counts[role] += 1
        engines.append(RealEngine(f"{role[0]}{counts[role]}", role, url.rstrip("/")))
    if not all(counts.values()):
        raise ValueError(f"{ENGINES_VARIABLE}: at least one engine of each role is needed, got {text!r}")
    return tuple(engines)


def tools_from(environ: Mapping[str, str]) -> Tools | None:
    """Return the scripts in NARWHAL_REAL_TOOLS, or None when it is not set."""
    folder = environ.get(TOOLS_VARIABLE, "").strip()
    if not folder:
        return None
    state = environ.get(STATE_VARIABLE) or Path.home() / ".cache" / "narwhal-vllm"
    return Tools(Path(folder), Path(state))


async def bring_up(engines: Sequence[RealEngine], tools: Tools | None) -> list[str]:
    """Return when every engine is healthy and every pair has exchanged KV once, with the names of those started.

    Raises NoEngines.
    """
    down = [engine.name for engine in engines if not await engine.healthy()]
    if down and tools is None:
        raise NoEngines(f"{', '.join(down)} of {ENGINES_VARIABLE} not healthy, and {TOOLS_VARIABLE} is not set")
    if down and tools is not None:
        await asyncio.to_thread(tools.start, *down)
    for prefill in engines:
        for decode in engines:
            if (prefill.role, decode.role) == ("prefill", "decode"):
                await exchange(prefill, decode, f"{os.urandom(8).hex()} warm", timeout_s=WARM_UP_S)
    return down


async def exchange(prefill: RealEngine, decode: RealEngine, prompt: str, *, timeout_s: float) -> Document:
    """Return what `decode` answers to a prompt whose KV it fetched from `prefill`, without any router."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 1}
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = await prefill.ask("/v1/completions", {**body, "kv_transfer_params": ask}, timeout_s=timeout_s)
    ticket = answer["kv_transfer_params"]
    return await decode.ask("/v1/completions", {**body, "kv_transfer_params": ticket}, timeout_s=timeout_s)


def _session(timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
