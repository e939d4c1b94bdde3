"""The demo's child processes: each in a session of its own, its words in a file, gone when the demo is.

On Linux a child dies with the demo even when that is killed with SIGKILL, so nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from narwhal.demo.redis_server import DIE_WITH_PARENT

POLL_S: Final = 0.02
LAST_WORDS: Final = 6


class Child:
    """One program that can be started again after it ended. Start it from the main thread: it dies with that thread."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self.starts = 0
        self.stopping = False
        self._command = tuple(command)
        self._environ = dict(environ)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the latest start."""
        return self._started().pid

    def start(self) -> None:
        """Run the program; what it says is appended to its log."""
        assert self._process is None or self._process.returncode is not None, f"{self.name} runs already"
        self.starts += 1
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own programs
                [*_watched(), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return how it ended (minus the signal's number for a signal), or None while it runs."""
        return self._started().poll()

    async def ended(self) -> int:
        """Return how it ended, once it has."""
        while True:
            code = self.poll()
            if code is not None:
                return code
            await asyncio.sleep(POLL_S)

    async def stop(self, *, timeout_s: float) -> None:
        """End it: SIGTERM, also when it is stopped by SIGSTOP, and SIGKILL after `timeout_s`. Safe to call twice."""
        self.stopping = True
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.signal(number)
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """End it at once, and for good."""
        self.stopping = True
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send `number`; nothing happens when it has ended or never ran."""
        if self._process is not None:
            self._process.send_signal(number)

    def last_words(self) -> str:
        """Return the end of its log, for a message about why it ended."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"  {line}" for line in lines[-LAST_WORDS:]) or "  (it said nothing)"

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was never started"
        return self._process


def how_it_ended(code: int) -> str:
    """Return an exit code in words: `exit code 1`, or `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _watched() -> list[str]:
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
