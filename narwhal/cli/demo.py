"""`narwhal demo`: a whole pair on this machine with one command, to play with or to drill."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narwhal.cli.exits import EXIT_FAILED, EXIT_MISUSED
from narwhal.cli.output import complain
from narwhal.errors import ConfigError, NarwhalError

if TYPE_CHECKING:
    from narwhal.demo.plan import DemoOptions, RealEngine

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Run a Redis-compatible server, two prefill and two decode stub engines, and two routers; print what runs where and what
to try; Ctrl-C ends it all and leaves nothing. With --drill: put load on it, kill the active router with SIGKILL, and
report; exit code 0 only if the fencing token rose, no two routers ever admitted at once, nothing failed but what was in
flight on the killed router, and the successor had every drain and ejection.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `narwhal demo`."""
    parser = subparsers.add_parser(
        "demo", help="run a whole pair on this machine, or drill it", description=_DESCRIPTION
    )
    parser.add_argument("--redis", metavar="URL", help="use this Redis instead of a private one")
    parser.add_argument(
        "--engine",
        metavar="ROLE=URL",
        action="append",
        default=[],
        type=_engine,
        help="use this engine, e.g. prefill=http://10.0.0.11:8000, not stubs; repeat it, at least one of each role",
    )
    parser.add_argument(
        "--ports-from", metavar="N", type=_base, default=8000, help="first of the ports that are used (default: 8000)"
    )
    parser.add_argument("--state-dir", metavar="DIR", type=Path, help="keep configuration, state and logs here")
    parser.add_argument("--lease-ttl", metavar="S", type=_ttl, default=2.0, help="life of the lease (default: 2)")
    parser.add_argument("--drill", choices=("kill-active",), help="run this drill unattended instead")
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on standard output, the rest on the other"
    )
    parser.set_defaults(run=_run)


def _engine(text: str) -> tuple[str, str]:
    from narwhal.config import http_url

    role, equals, url = text.partition("=")
    if not equals or role not in ("prefill", "decode"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be prefill=URL or decode=URL")
    try:
        return role, http_url(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: the address {error}") from error


def _base(text: str) -> int:
    value = int(text)
    if not 1024 <= value <= 60_000:
        raise argparse.ArgumentTypeError("must be 1024 to 60000")
    return value


def _ttl(text: str) -> float:
    value = float(text)
    if not 0.5 <= value <= 60:
        raise argparse.ArgumentTypeError("must be 0.5 to 60 seconds")
    return value


def _run(args: argparse.Namespace) -> int:
    if (problem := _problem(args)) is not None:
        complain(problem)
        return EXIT_MISUSED
    from narwhal.demo.run import run_demo, run_drill

    run: Any = run_drill if args.drill else run_demo
    try:
        return int(asyncio.run(run(_options(args), as_json=args.json)))
    except ConfigError:
        raise
    except NarwhalError as error:
        complain(str(error))
        return EXIT_FAILED


def _problem(args: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments taken together."""
    roles = {role for role, _ in args.engine}
    if args.engine and roles != {"prefill", "decode"}:
        return f"--engine: give at least one prefill and one decode engine, not only {', '.join(sorted(roles))}"
    if args.drill and args.engine:
        return "--drill needs the stub engines, whose health it breaks on purpose; leave --engine away"
    if args.drill:
        try:
            import openai  # noqa: F401
        except ImportError:
            return "--drill needs the official client; install it with `pip install 'narwhal-ha[demo]'`"
    return None


def _options(args: argparse.Namespace) -> DemoOptions:
    from narwhal.demo.plan import DemoOptions, RealEngine

    engines: tuple[RealEngine, ...] = tuple(RealEngine(role, url) for role, url in args.engine)
    return DemoOptions(
        redis_url=args.redis,
        engines=engines,
        ports_from=args.ports_from,
        state_dir=args.state_dir,
        lease_ttl_s=args.lease_ttl,
    )
