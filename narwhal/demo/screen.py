"""What the demo shows: what runs where, what to try, where to look inside. Its lines work in another terminal."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from narwhal.demo.fleet import Fleet
from narwhal.demo.plan import PlannedRouter
from narwhal.store.connection import spoken_address
from narwhal.store.keys import Keys

WIDEST: Final = 10_000
CHAT: Final = '{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'


def show(console: Console, fleet: Fleet, active: PlannedRouter) -> None:
    """Print everything that a person needs to play with the running pair."""
    console.print()
    table = _what_runs_where(fleet, active)
    needed = Console(width=WIDEST).measure(table).maximum
    Console(file=console.file, width=max(console.width, needed)).print(table)
    for title, lines in _sections(fleet, active):
        console.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nLogs and configuration are in {fleet.folder}", highlight=False, soft_wrap=True)
    console.print(
        "[bold]Ctrl-C stops everything.[/bold] A router or stub engine that you kill comes back by itself.\n",
        soft_wrap=True,
    )


def describe(fleet: Fleet, active: PlannedRouter) -> dict[str, Any]:
    """Return what runs where as a document for machines."""
    plan = fleet.plan
    return {
        "cluster": plan.cluster,
        "redis": spoken_address(fleet.redis_url),
        "redis_pid": fleet.redis.pid if fleet.redis is not None else None,
        "models": list(plan.models),
        "active": active.id,
        "folder": str(fleet.folder),
        "routers": [
            {
                "id": router.id,
                "url": router.url,
                "admin_url": router.admin_url,
                "pid": fleet.children[router.id].pid,
                "config": str(router.config_file),
                "log": str(fleet.children[router.id].log),
            }
            for router in plan.routers
        ],
        "engines": [
            {
                "id": engine.id,
                "role": engine.role,
                "url": engine.url,
                "admin_url": engine.admin_url,
                "pid": fleet.children[engine.id].pid if engine.id in fleet.children else None,
            }
            for engine in plan.engines
        ],
    }


def _what_runs_where(fleet: Fleet, active: PlannedRouter) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("what", "where", "operators", "process"):
        table.add_column(column, no_wrap=True, justify="right" if column == "process" else "left")
    redis = fleet.redis
    told = "Redis, yours" if redis is None else f"Redis ({redis.kind} {redis.version})"
    table.add_row(told, spoken_address(fleet.redis_url), "", "" if redis is None else str(redis.pid))
    for router in fleet.plan.routers:
        role = "[bold green]active[/]" if router.id == active.id else "standby"
        table.add_row(f"{router.id}, {role}", router.url, router.admin_url, str(fleet.children[router.id].pid))
    for engine in fleet.plan.engines:
        child = fleet.children.get(engine.id)
        what = f"{engine.id}, stub" if child is not None else f"{engine.id}, yours"
        table.add_row(what, engine.url, engine.admin_url or "", "" if child is None else str(child.pid))
    return table


def _sections(fleet: Fleet, active: PlannedRouter) -> list[tuple[str, list[str]]]:
    model = fleet.plan.models[0]
    config = shlex.quote(str(fleet.plan.routers[0].config_file))
    narwhal = _narwhal()
    return [
        (
            "Try it",
            [
                f"curl -N {active.url}/v1/chat/completions -H 'Content-Type: application/json'"
                f" -d {shlex.quote(CHAT % model)}"
            ],
        ),
        ("From Python (pip install openai)", _python(active.url, model)),
        (
            "The pair and its engines",
            [
                f"{narwhal} ha status --config {config}",
                f"{narwhal} ha kill-active --config {config}",
                f"{narwhal} engines list --config {config}",
                f"{narwhal} engines drain {fleet.plan.engines[0].id} --reason 'trying it' --config {config}",
                f"{narwhal} engines undrain {fleet.plan.engines[0].id} --config {config}",
            ],
        ),
        ("Inside Redis" + _without_redis_cli(), _redis_lines(fleet)),
    ]


def _python(url: str, model: str) -> list[str]:
    return [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="none")',
        'hello = [{"role": "user", "content": "Hello"}]',
        f'for chunk in client.chat.completions.create(model="{model}", messages=hello, stream=True):',
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ]


def _redis_lines(fleet: Fleet) -> list[str]:
    keys = Keys.of(fleet.plan.cluster)
    redis = "redis-cli " + shlex.join(_redis_words(fleet))
    asked = (
        (("GET", keys.lease), "who is active, and under which fencing token"),
        (("PTTL", keys.lease), "milliseconds until the lease runs out"),
        (("GET", keys.token), "highest fencing token ever granted"),
        (("HMGET", keys.handoff, "tok", "ver", "at"), "token, version and time of the handoff"),
        (("HGET", keys.handoff, "doc"), "the handoff itself"),
        (("XREVRANGE", keys.events, "+", "-", "COUNT", "10"), "what happened last"),
    )
    lines = [(f"{redis} {shlex.join(words)}", why) for words, why in asked]
    width = max(len(line) for line, _ in lines)
    return [f"{line:<{width}}  # {why}" for line, why in lines]


def _redis_words(fleet: Fleet) -> list[str]:
    return ["-p", str(fleet.redis.port)] if fleet.redis is not None else ["-u", spoken_address(fleet.redis_url)]


def _without_redis_cli() -> str:
    return (
        "" if shutil.which("redis-cli") else " (redis-cli is not installed here; Debian: apt-get install redis-tools)"
    )


def _narwhal() -> str:
    """Return how another terminal calls the command that runs now."""
    own = Path(sys.executable).with_name("narwhal")
    found = shutil.which("narwhal")
    if found is not None and Path(found).resolve() == own.resolve():
        return "narwhal"
    return shlex.quote(str(own)) if own.exists() else f"{shlex.quote(sys.executable)} -m narwhal"
