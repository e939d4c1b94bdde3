"""The Lua scripts, read from `lua/` once. Each file says its keys, arguments and answers at the top.

They run on Redis 7.0 or newer and on Valkey: the first line of each (`#!lua flags=...`) tells the server what the
script may do when memory is full.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """One script; `sha` is what EVALSHA asks for."""

    name: str
    text: str

    @property
    def sha(self) -> str:
        """The digest under which the server caches the script."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def without_flags(self) -> Script:
        """Return the script without its first line, for an emulated server that knows no flags."""
        return Script(self.name, self.text.partition("\n")[2])


def _read(name: str) -> Script:
    return Script(name.upper(), (files("narwhal.store") / "lua" / f"{name}.lua").read_text(encoding="utf-8"))


OBSERVE: Final = _read("observe")
ACQUIRE: Final = _read("acquire")
RENEW: Final = _read("renew")
RELEASE: Final = _read("release")
CLAIM: Final = _read("claim")
ANNOUNCE: Final = _read("announce")
PUT_HANDOFF: Final = _read("put_handoff")

ALL: Final = (OBSERVE, ACQUIRE, RENEW, RELEASE, CLAIM, ANNOUNCE, PUT_HANDOFF)
