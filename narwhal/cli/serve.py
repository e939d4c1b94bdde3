"""`narwhal-serve` and `narwhal serve`: one router of the pair."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narwhal import __version__
from narwhal.cli.exits import guarded

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SUMMARY = "run one router: serve the fleet, or follow the router that does"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `narwhal-serve` with `argv` (default: the process's arguments) and return its exit code."""
    parser = argparse.ArgumentParser(prog="narwhal-serve", description=_SUMMARY.capitalize() + ".")
    parser.add_argument("--version", action="version", version=f"narwhal {__version__}")
    _add_arguments(parser)
    args = parser.parse_args(argv)
    return guarded(lambda: _run(args))


def add_parser(subparsers: Subparsers) -> None:
    """Add `narwhal serve`."""
    parser = subparsers.add_parser("serve", help=_SUMMARY, description=_SUMMARY.capitalize() + ".")
    _add_arguments(parser)
    parser.set_defaults(run=_run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="configuration, .toml or .json")
    parser.add_argument("--router-id", metavar="ID", help="overrides router.id of the configuration")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume", action="store_true", help="apply the saved handoff; refuse to start if it does not fit"
    )
    start.add_argument("--fresh", action="store_true", help="start without the saved handoff, which is kept aside")
    tenure = parser.add_mutually_exclusive_group()
    tenure.add_argument(
        "--role",
        choices=("auto", "active", "standby"),
        default="auto",
        help="auto: whoever gets the lease serves; active: compete at once; standby: follow first (default: auto)",
    )
    tenure.add_argument("--solo", action="store_true", help="serve without Redis and without a second router")


def _run(args: argparse.Namespace) -> int:
    from narwhal.cli.settings import load_config, read_secrets
    from narwhal.log import configure_logging

    config = load_config(args.config, environ=os.environ, router_id=args.router_id)
    secrets = read_secrets(os.environ)
    configure_logging(format=config.log.format, level=config.log.level)

    from narwhal.router import ServeOptions, run

    options = ServeOptions(
        role=args.role,
        resume=args.resume,
        fresh=args.fresh,
        solo=args.solo,
        redis_username=secrets.redis_username,
        redis_password=secrets.redis_password,
        admin_token=secrets.admin_token,
    )
    return run(config, options)
