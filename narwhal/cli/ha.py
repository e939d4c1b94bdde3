"""`narwhal ha`: look at the pair, and end its active router to see the other one follow."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from narwhal.cli.cluster import Cluster, add_cluster_arguments, command_line, find_cluster, opened
from narwhal.cli.exits import EXIT_FAILED, EXIT_OK
from narwhal.cli.output import EXIT_UNREACHABLE, complain, plain_table, print_json, print_table, seconds
from narwhal.errors import StoreMisused, StoreUnavailable

if TYPE_CHECKING:
    from narwhal.cli.ha_view import PairView, RouterView
    from narwhal.core.lease import LeaseRecord
    from narwhal.ha.kill import Holder, Successor
    from narwhal.store.opening import RedisStores

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_ELSEWHERE: Final = 4
EXIT_UNIDENTIFIED: Final = 5

SIGNALS: Final = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP}


def add_parser(subparsers: Subparsers) -> None:
    """Add `narwhal ha status` and `narwhal ha kill-active`."""
    parser = subparsers.add_parser("ha", help="look at the pair, or end its active router")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    status = actions.add_parser(
        "status",
        help="who is active, who could take over",
        description="Show the pair. Exit code 0 only with exactly one serving active and at least one warm standby,"
        " 1 otherwise, 3 when Redis cannot be reached.",
    )
    add_cluster_arguments(status)
    status.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    status.set_defaults(run=_status)

    kill = actions.add_parser(
        "kill-active",
        help="signal the process that holds the lease, and report who follows",
        description="Signal exactly the process that the lease names. Exit code 0 when another term began, 1 when none"
        " did or nobody was active, 3 when Redis cannot be reached, 4 when the holder runs on another host, 5 when no"
        " process here is the one that the lease names.",
    )
    add_cluster_arguments(kill)
    kill.add_argument("--signal", choices=SIGNALS, default="KILL", help="what to send (default: KILL, as a crash)")
    kill.add_argument(
        "--timeout", metavar="S", type=_positive, default=15.0, help="longest wait for the successor (default: 15)"
    )
    kill.add_argument("--json", action="store_true", help="one JSON document instead of text")
    kill.set_defaults(run=_kill_active)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 3600 seconds")
    return value


def _status(args: argparse.Namespace) -> int:
    return _run(_show_status(find_cluster(args, os.environ), as_json=args.json))


def _kill_active(args: argparse.Namespace) -> int:
    return _run(_end_active(find_cluster(args, os.environ), args))


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Return the exit code of `work`; a Redis that gives no usable answer is said in a line."""
    try:
        return asyncio.run(work)
    except (StoreUnavailable, StoreMisused) as error:
        complain(str(error))
        return EXIT_UNREACHABLE


async def _show_status(cluster: Cluster, *, as_json: bool) -> int:
    from narwhal.cli.ha_view import look

    async with opened(cluster) as stores:
        view = await look(stores, cluster=cluster.name)
    problems = view.problems()
    if as_json:
        print_json(_status_document(view, cluster, stores.address, problems))
    else:
        _print_status(view, cluster, stores.address, problems)
    return EXIT_FAILED if problems else EXIT_OK


def _print_status(view: PairView, cluster: Cluster, address: str, problems: Sequence[str]) -> None:
    seen = view.seen
    print(f"cluster {cluster.name} in {address}")
    if seen.handoff is not None:
        print(f"handoff version {seen.handoff[1]} of token {seen.handoff[0]}, {seconds(view.handoff_age_s)} old")
    if seen.claim is not None:
        print(f"{seen.claim.router} asks the active to give way: {seen.claim.reason}")
    print()
    table = plain_table(
        ("router", "role", "ready", "token", "lease ms", "handoff", "behind", "announced", "address", "reason"),
        right=("token", "lease ms", "handoff", "behind", "announced"),
    )
    for router in view.routers:
        table.add_row(*_status_row(view, router))
    print_table(table)
    print()
    print("one active, one warm standby" if not problems else "\n".join(f"problem: {problem}" for problem in problems))


def _status_row(view: PairView, router: RouterView) -> tuple[str, ...]:
    record = view.seen.record
    holds = record is not None and record.router == router.member.router
    ready = {True: "yes", False: "no"}[router.ready.ready] if router.ready.document is not None else "?"
    return (
        router.member.router,
        router.role,
        ready,
        str(record.token) if holds and record is not None else "-",
        str(view.seen.pttl_ms) if holds else "-",
        "-" if router.member.handoff is None else str(router.member.handoff[1]),
        "-" if router.behind is None else str(router.behind),
        "-" if router.age_s is None else f"{seconds(router.age_s)} ago",
        router.member.url,
        router.reason,
    )


def _status_document(view: PairView, cluster: Cluster, address: str, problems: Sequence[str]) -> dict[str, Any]:
    seen = view.seen
    return {
        "cluster": cluster.name,
        "redis": address,
        "healthy": not problems,
        "problems": list(problems),
        "fencing_token": seen.token,
        "lease": seen.record and {**_record(seen.record), "remaining_ms": seen.pttl_ms},
        "claim": seen.claim and {"router": seen.claim.router, "reason": seen.claim.reason},
        "handoff": seen.handoff
        and {"fencing_token": seen.handoff[0], "version": seen.handoff[1], "age_s": view.handoff_age_s},
        "routers": [_router_document(router) for router in view.routers],
    }


def _router_document(view: RouterView) -> dict[str, Any]:
    member, ready = view.member, view.ready
    return {
        "router": member.router,
        "role": view.role,
        "ready": ready.ready if ready.document is not None else None,
        "reason": view.reason,
        "warm": view.warm,
        "reach": ready.reach,
        "fencing_token": (ready.document or {}).get("fencing_token"),
        "announced_role": member.role,
        "announced_reason": member.reason,
        "announced_age_s": view.age_s,
        "followed": member.handoff and {"fencing_token": member.handoff[0], "version": member.handoff[1]},
        "behind": view.behind,
        "url": member.url,
        "admin_url": member.admin_url,
        "version": member.version,
    }


def _record(record: LeaseRecord) -> dict[str, Any]:
    return {
        "router": record.router,
        "incarnation": record.incarnation,
        "fencing_token": record.token,
        "ttl_ms": record.ttl_ms,
        "url": record.url,
        "admin_url": record.admin_url,
        "host": record.process.host,
        "pid": record.process.pid,
    }


async def _end_active(cluster: Cluster, args: argparse.Namespace) -> int:
    from narwhal.ha.kill import HolderElsewhere, HolderUnknown, NobodyHolds, active_process

    async with opened(cluster) as stores:
        seen = await stores.lease.observe()
        try:
            with active_process(seen.record, lease_left_ms=seen.pttl_ms) as holder:
                return await _signal_and_watch(stores, holder, args)
        except NobodyHolds as error:
            complain(str(error))
            return EXIT_FAILED
        except HolderElsewhere as error:
            complain(f"{error}. There, run:\n{_how_there(cluster, error.record, args.signal)}")
            return EXIT_ELSEWHERE
        except HolderUnknown as error:
            complain(str(error))
            return EXIT_UNIDENTIFIED
        except PermissionError:
            record = seen.record
            complain(f"not allowed to signal {record.router if record else 'it'}; run this as its user, or as root")
            return EXIT_FAILED


def _how_there(cluster: Cluster, record: LeaseRecord, name: str) -> str:
    words = ("narwhal", "ha", "kill-active", "--redis", cluster.ha.redis_url, "--cluster", cluster.name)
    process = record.process
    by_hand = (
        f"[ \"$(awk '{{print $22}}' /proc/{process.pid}/stat)\" = {process.start_ticks} ] && kill -{name} {process.pid}"
    )
    return (
        f"  {command_line(*words, '--signal', name)}\nor, without narwhal, in the same container or host:\n  {by_hand}"
    )


async def _signal_and_watch(stores: RedisStores, holder: Holder, args: argparse.Namespace) -> int:
    from narwhal.ha.kill import await_successor
    from narwhal.ha.peer import HttpRouterPeer

    if not args.json:
        record = holder.record
        print(
            f"{record.router} is active: process {holder.pid}, token {record.token},"
            f" {holder.lease_left_ms} ms of its lease left",
            flush=True,
        )
    peer = HttpRouterPeer()
    sent_at = asyncio.get_running_loop().time()
    holder.send(SIGNALS[args.signal])
    if not args.json:
        print(f"sent SIG{args.signal}; waiting up to {args.timeout:g} s for the next term", flush=True)
    try:
        successor = await await_successor(
            stores.lease, peer, holder.record.token, since=sent_at, timeout_s=args.timeout
        )
    finally:
        await peer.aclose()
    if args.json:
        print_json(_kill_document(holder, successor, args.signal))
    else:
        _print_successor(holder, successor, args)
    return EXIT_OK if successor is not None else EXIT_FAILED


def _print_successor(holder: Holder, successor: Successor | None, args: argparse.Namespace) -> None:
    if successor is None:
        complain(f"nobody took the lease in {args.timeout:g} s; is there a standby? See `narwhal ha status`")
    else:
        print(f"{successor.router} follows with token {successor.token}")
        print(f"  lease taken after {successor.lease_ms:.0f} ms")
        if successor.ready_ms is None:
            print(f"  {successor.url}/ready did not say 200 to this host in time")
        else:
            print(f"  ready after       {successor.ready_ms:.0f} ms")
    if args.signal == "STOP":
        print(f"{holder.record.router} is stopped, not ended; `kill -CONT {holder.pid}` wakes it")


def _kill_document(holder: Holder, successor: Successor | None, name: str) -> dict[str, Any]:
    record = holder.record
    return {
        "signal": name,
        "holder": {
            "router": record.router,
            "fencing_token": record.token,
            "pid": holder.pid,
            "lease_left_ms": holder.lease_left_ms,
        },
        "successor": successor and {"router": successor.router, "fencing_token": successor.token, "url": successor.url},
        "lease_gap_ms": successor and round(successor.lease_ms, 1),
        "ready_gap_ms": successor and successor.ready_ms and round(successor.ready_ms, 1),
    }
