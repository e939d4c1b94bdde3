"""`narwhal stub-engine`: an engine for demos and tests, with the faults of real ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from narwhal.cli.exits import EXIT_FAILED, EXIT_MISUSED, EXIT_OK

if TYPE_CHECKING:
    from narwhal.testing.stub_engine import StubSettings

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
A fault is [LEG:]KIND[=VALUE][,KEY=VALUE...], for example
  --fault decode:status=503,retry_after_s=2,times=3    --fault health:hang    --fault decode:silence=5,every=10
LEG is prefill, decode, health, info or any (the default). times=N heals after N, every=K meets each K-th request,
skip=N lets N pass first. KIND is one of
  refuse[=closed|rst]  hang  reset  restart  paused  other_model=NAME  delay=MS
  status=CODE [retry_after_s, body]          bad_200[=error|null_choices|not_json|empty]
  bad_ticket[=null|absent|missing_key|empty_blocks|empty_group|not_a_dict]  stale_ticket
  no_first_token [keepalive_ms]  silence=TOKENS  cut=TOKENS  error_frame=TOKENS  no_finish[=true|false]
  slow=MS  split  big_frame[=BYTES]

Faults can also be posted to /stub/faults while the engine runs; GET /stub/state shows its counters. Once it listens, it
prints one line of JSON with its addresses.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `narwhal stub-engine`."""
    parser = subparsers.add_parser(
        "stub-engine",
        help="run an engine that speaks vLLM's prefill/decode protocol and makes up its tokens",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--role", choices=("prefill", "decode"), required=True, help="what it is used for")
    parser.add_argument("--port", type=int, required=True, metavar="N", help="port to listen on; 0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on")
    parser.add_argument(
        "--admin-port", type=int, default=0, metavar="N", help="loopback port that stays open under every fault"
    )
    parser.add_argument("--advertise-url", metavar="URL", help="where decode engines fetch KV from this one")
    parser.add_argument("--model", default="stub-model", metavar="NAME", help="model to serve (default: stub-model)")
    parser.add_argument("--engine-id", metavar="ID", help="KV engine id (default: a new one at each start)")
    parser.add_argument("--itl", type=float, default=0.0, metavar="MS", help="time between two tokens")
    parser.add_argument("--prefill-ms", type=float, default=0.0, metavar="MS", help="time to compute a prompt")
    parser.add_argument("--max-model-len", type=int, default=32_768, metavar="N", help="longest prompt and answer")
    parser.add_argument("--kv-lease-s", type=float, default=30.0, metavar="S", help="how long a ticket is good")
    parser.add_argument("--strict-death", action="store_true", help="die of a malformed ticket, as a real engine does")
    parser.add_argument("--fault", action="append", default=[], metavar="SPEC", help="may be given several times")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from narwhal.testing.stub_engine import FaultSpecError, StubSettings, parse_fault

    try:
        faults = tuple(parse_fault(text) for text in args.fault)
    except FaultSpecError as error:
        print(f"narwhal stub-engine: {error}", file=sys.stderr)
        return EXIT_MISUSED
    settings = StubSettings(
        role=args.role,
        model=args.model,
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        advertise_url=args.advertise_url,
        engine_id=args.engine_id,
        itl_ms=args.itl,
        prefill_ms=args.prefill_ms,
        max_model_len=args.max_model_len,
        kv_lease_s=args.kv_lease_s,
        strict_death=args.strict_death,
        faults=faults,
    )
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: StubSettings) -> int:
    """Run the engine until SIGTERM or SIGINT, or until it dies; a dead engine's process ends as vLLM's does."""
    from narwhal.testing.stub_engine import StubEngine

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    engine = StubEngine(settings)
    try:
        url = await engine.start()
    except OSError as error:
        print(f"narwhal stub-engine: cannot listen on {settings.host}:{settings.port}: {error}", file=sys.stderr)
        return EXIT_FAILED
    ready = {
        "event": "stub_engine_started",
        "role": settings.role,
        "url": url,
        "admin_url": engine.admin_url,
        "engine_id": engine.generation.engine_id,
        "pid": os.getpid(),
    }
    print(json.dumps(ready), flush=True)
    waits = [asyncio.ensure_future(event.wait()) for event in (stopping, engine.died)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if not engine.died.is_set():
        await engine.stop()
        return EXIT_OK
    print("narwhal stub-engine: died of a malformed KV ticket, as a real engine does", file=sys.stderr)
    await asyncio.sleep(0.2)
    await engine.stop()
    return EXIT_FAILED
