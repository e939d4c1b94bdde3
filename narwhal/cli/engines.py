"""`narwhal engines`: look at the fleet as the active router sees it, and drain engines."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from narwhal.cli.cluster import Cluster, add_cluster_arguments, find_cluster, opened
from narwhal.cli.exits import EXIT_FAILED, EXIT_OK
from narwhal.cli.output import EXIT_UNREACHABLE, complain, plain_table, print_json, print_table, seconds
from narwhal.errors import NarwhalError, StoreMisused, StoreUnavailable

if TYPE_CHECKING:
    from narwhal.ha.admin_client import AdminClient

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Answer = TypeVar("Answer")


class NoAdminPort(NarwhalError):
    """There is no admin port to ask; the message says why and what to do."""


def add_parser(subparsers: Subparsers) -> None:
    """Add `narwhal engines list|show|drain|undrain`."""
    parser = subparsers.add_parser("engines", help="look at the engines, or drain one")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    about = (
        ("list", "every engine: state, load, failures"),
        ("show", "all that is known of one engine"),
        ("drain", "give an engine no new work; what runs on it goes on"),
        ("undrain", "give a drained engine work again"),
    )
    for action, words in about:
        child = actions.add_parser(
            action,
            help=words,
            description=f"{words[0].upper()}{words[1:]}. Asks the active router; exit code 0, 1 when it refused,"
            " 3 when nobody answered.",
        )
        if action != "list":
            child.add_argument("engine", metavar="ID", help="the engine's id")
        if action in ("drain", "undrain"):
            child.add_argument("--reason", default="", metavar="TEXT", help="why; kept with the hold")
        add_cluster_arguments(child)
        child.add_argument("--admin", metavar="URL", help="the admin port to ask, instead of the one in the lease")
        child.add_argument("--json", action="store_true", help="one JSON document instead of a table")
        child.set_defaults(run=_run, action=action)


def _run(args: argparse.Namespace) -> int:
    from narwhal.ha.admin_client import AdminRefused, AdminUnreachable

    try:
        return asyncio.run(_ask_and_print(args))
    except AdminRefused as error:
        complain(str(error))
        return EXIT_FAILED
    except (StoreUnavailable, StoreMisused, NoAdminPort) as error:
        complain(str(error))
    except AdminUnreachable as error:
        complain(f"{error}. Admin ports listen on loopback unless told otherwise: run this there, or give --admin URL")
    return EXIT_UNREACHABLE


async def _ask_and_print(args: argparse.Namespace) -> int:
    door = await _find_door(args)
    if args.action == "list":
        engines = await door.ask(lambda client: client.engines())
        print_json({"engines": engines}) if args.json else _print_engines(engines)
        return EXIT_OK
    if args.action == "show":
        engine = await door.ask(lambda client: client.engine(args.engine))
    else:
        engine = await door.ask(lambda client: client.act(args.action, args.engine, actor=_actor(), reason=args.reason))
    if args.json:
        print_json(engine)
    elif args.action == "show":
        _print_engine(engine)
    else:
        print(f"{engine['id']} is {engine['state']}, {engine['inflight']} in flight")
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Door:
    """The admin port to ask, and how to find another one when it is not the active's."""

    url: str
    token: str | None
    cluster: Cluster | None

    async def ask(self, question: Callable[[AdminClient], Awaitable[Answer]]) -> Answer:
        """Return the answer of this port, or of the owner that it names: a lease may move between look and question."""
        from narwhal.ha.admin_client import AdminClient, AdminRefused

        async with AdminClient(self.url, token=self.token) as client:
            try:
                return await question(client)
            except AdminRefused as error:
                if error.owner is None or self.cluster is None:
                    raise
                url = await _admin_url(self.cluster, router=error.owner)
        async with AdminClient(url, token=self.token) as client:
            return await question(client)


async def _find_door(args: argparse.Namespace) -> Door:
    from narwhal.cli.settings import read_secrets

    if args.admin is not None:
        named = args.config or args.redis or os.environ.get("NARWHAL_CONFIG") or os.environ.get("NARWHAL_REDIS_URL")
        cluster = find_cluster(args, os.environ) if named else None
        return Door(args.admin, read_secrets(os.environ).admin_token, cluster)
    cluster = find_cluster(args, os.environ)
    return Door(await _admin_url(cluster, router=None), cluster.secrets.admin_token, cluster)


async def _admin_url(cluster: Cluster, *, router: str | None) -> str:
    """Return the admin port of `router`, by default of whoever holds the lease. Raises NoAdminPort."""
    async with opened(cluster) as stores:
        record = (await stores.lease.observe()).record
        if record is not None and router in (None, record.router):
            return record.admin_url
        if router is None:
            raise NoAdminPort(
                f"cluster {cluster.name} has no active router; see `narwhal ha status`, or ask one with --admin URL"
            )
        for member in await stores.lease.members():
            if member.router == router:
                return member.admin_url
    raise NoAdminPort(
        f"{router} is said to be active, but it has not announced an admin port; give it with --admin URL"
    )


def _actor() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "operator"


def _print_engines(engines: list[dict[str, Any]]) -> None:
    table = plain_table(
        ("engine", "role", "state", "healthy", "in flight", "streaks", "holds", "url"), right=("in flight",)
    )
    for engine in engines:
        table.add_row(
            engine["id"],
            engine["role"],
            engine["state"],
            {True: "yes", False: "no", None: "?"}[engine["healthy"]],
            str(engine["inflight"]),
            _streaks(engine),
            "; ".join(_hold(hold) for hold in engine["holds"]) or _ejection(engine) or "-",
            engine["url"],
        )
    print_table(table)


def _print_engine(engine: dict[str, Any]) -> None:
    healthy = {True: "answers /health", False: "does not answer /health", None: "health not known yet"}[
        engine["healthy"]
    ]
    print(f"{engine['id']}  {engine['role']}  {engine['state']}  {engine['url']}")
    print(f"  {healthy}, {engine['inflight']} in flight, generation {engine['generation'] or 'not known'}")
    print(f"  streaks    {_streaks(engine)}")
    if engine["ejection"]:
        print(f"  ejected    {_ejection(engine)}")
    for hold in engine["holds"]:
        print(f"  hold       {_hold(hold)}")
    print(f"  interval   {engine['interval']['succeeded']} legs succeeded, {engine['interval']['failed']} failed")
    for remark in engine["history"]:
        print(f"  {seconds(remark['age_s']):>8} ago  {remark['what']}{': ' + remark['why'] if remark['why'] else ''}")


def _streaks(engine: dict[str, Any]) -> str:
    streaks = {**engine["streaks"], **engine["leg_streaks"]}
    return ", ".join(f"{name} {count}" for name, count in streaks.items() if count) or "-"


def _hold(hold: dict[str, Any]) -> str:
    who = " by ".join(word for word in (hold["kind"], hold["actor"]) if word)
    why = f" ({hold['reason']})" if hold["reason"] else ""
    left = "" if hold["remaining_s"] is None else f", {seconds(hold['remaining_s'])} left"
    probe = "" if hold["next_probe_s"] is None else f", next probe in {seconds(hold['next_probe_s'])}"
    settled = ", settled" if hold["settled"] else ""
    return f"{who}{why} for {seconds(hold['age_s'])}{left}{probe}{settled}"


def _ejection(engine: dict[str, Any]) -> str:
    ejection = engine["ejection"]
    if not ejection:
        return ""
    stopped = (
        f", readmission stopped at {ejection['last_step']}: {ejection['last_reason']}" if ejection["last_step"] else ""
    )
    detail = f" ({ejection['detail']})" if ejection["detail"] else ""
    return f"{ejection['cause']}{detail} for {seconds(ejection['age_s'])}{stopped}"
