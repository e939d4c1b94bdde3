"""The commands `narwhal` and `narwhal-serve`: read files and environment, print, exit.

A command is a module with `add_parser(subparsers)`, which sets `run` to a function from the parsed arguments to an exit
code. Modules import what they need inside that function, so that `narwhal --help` stays quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from narwhal import __version__
from narwhal.cli import config_command, demo, engines, ha, serve, stub_engine
from narwhal.cli.exits import guarded

_COMMANDS = (demo, serve, ha, engines, config_command, stub_engine)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `narwhal` with `argv` (default: the process's arguments) and return its exit code."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: int(args.run(args)))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `narwhal` with all its commands."""
    parser = argparse.ArgumentParser(
        prog="narwhal", description="A highly available router in front of a prefill/decode inference fleet."
    )
    parser.add_argument("--version", action="version", version=f"narwhal {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser
