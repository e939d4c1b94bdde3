"""What a demo consists of, decided before anything is started: ports, engines, routers, and their configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from narwhal.config import parse_config
from narwhal.demo.ports import BASE, Ports, choose_ports

STUB_MODEL: Final = "stub"
STUBS: Final[tuple[Literal["prefill", "decode"], ...]] = ("prefill", "prefill", "decode", "decode")
ROUTER_IDS: Final = ("router-a", "router-b")
GRACEFUL_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RealEngine:
    """An engine that runs already; the demo only sends requests to it."""

    role: Literal["prefill", "decode"]
    url: str


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `narwhal demo` was told. Without `redis_url` it runs a server of its own, without `engines` stub engines."""

    redis_url: str | None = None
    engines: tuple[RealEngine, ...] = ()
    ports_from: int = BASE
    state_dir: Path | None = None
    lease_ttl_s: float = 2.0
    itl_ms: float = 15.0


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine of the fleet; `admin_url` is where a stub's faults are set, None for a real engine."""

    id: str
    role: Literal["prefill", "decode"]
    url: str
    admin_url: str | None = None
    port: int = 0
    admin_port: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRouter:
    """One router of the pair, and the file that it is started with."""

    id: str
    port: int
    admin_port: int
    config_file: Path

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """Where operators reach it."""
        return f"http://127.0.0.1:{self.admin_port}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will run. `remark` is worth telling; `ports` says where our own Redis goes."""

    cluster: str
    models: tuple[str, ...]
    ports: Ports
    remark: str | None
    engines: tuple[PlannedEngine, ...]
    routers: tuple[PlannedRouter, ...]


def make_plan(options: DemoOptions, *, folder: Path, cluster: str, models: Sequence[str]) -> Plan:
    """Return the plan for `options` with its files under `folder`. Raises NoPorts."""
    stubs = 0 if options.engines else len(STUBS)
    ports, remark = choose_ports(options.ports_from, engines=stubs, redis=options.redis_url is None)
    routers = tuple(
        PlannedRouter(name, ports.traffic(index), ports.admin(index), folder / f"{name}.toml")
        for index, name in enumerate(ROUTER_IDS)
    )
    engines = _real(options.engines) if options.engines else _stubs(ports)
    return Plan(cluster, tuple(models), ports, remark, engines, routers)


def _real(engines: Sequence[RealEngine]) -> tuple[PlannedEngine, ...]:
    counts = {"prefill": 0, "decode": 0}
    planned = []
    for engine in engines:
        counts[engine.role] += 1
        planned.append(PlannedEngine(f"{engine.role}-{counts[engine.role]}", engine.role, engine.url))
    return tuple(planned)


def _stubs(ports: Ports) -> tuple[PlannedEngine, ...]:
    named = _real([RealEngine(role, "") for role in STUBS])
    return tuple(
        PlannedEngine(
            engine.id,
            engine.role,
            f"http://127.0.0.1:{ports.engine(index)}",
            f"http://127.0.0.1:{ports.engine_admin(index)}",
            ports.engine(index),
            ports.engine_admin(index),
        )
        for index, engine in enumerate(named)
    )


def render_config(plan: Plan, router: PlannedRouter, *, redis_url: str, lease_ttl_s: float, folder: Path) -> str:
    """Return the TOML file of `router`, valid as `narwhal-serve` judges it. Raises ConfigError when it is not."""
    document = _document(plan, router, redis_url=redis_url, lease_ttl_s=lease_ttl_s, folder=folder)
    text = "# Written by `narwhal demo`; `narwhal config show --defaults` explains every key.\n" + _toml(document)
    parse_config(document, source=str(router.config_file))
    return text


Setting = str | int | float | list[str]
Table = dict[str, Setting]


def _document(
    plan: Plan, router: PlannedRouter, *, redis_url: str, lease_ttl_s: float, folder: Path
) -> dict[str, Table | list[Table]]:
    """Return the settings. Renewal, time-out and margin keep their proportion to the lease; the monitor is quick."""
    return {
        "router": {
            "id": router.id,
            "port": router.port,
            "admin_port": router.admin_port,
            "state_dir": str(folder / "state"),
        },
        "serving": {"models": list(plan.models), "graceful_timeout_s": GRACEFUL_TIMEOUT_S},
        "ha": {
            "cluster": plan.cluster,
            "redis_url": redis_url,
            "lease_ttl_s": lease_ttl_s,
            "renew_every_s": round(lease_ttl_s * 0.2, 4),
            "op_timeout_s": round(lease_ttl_s * 0.15, 4),
            "margin_s": max(0.05, round(lease_ttl_s * 0.1, 4)),
            "poll_every_s": min(0.05, round(lease_ttl_s * 0.2, 4)),
        },
        "controller": {"pass_every_s": 0.5},
        "recovery": {"liveness_every_s": 1.0, "liveness_timeout_s": 1.0},
        "engines": [{"id": engine.id, "url": engine.url, "role": engine.role} for engine in plan.engines],
    }


def _toml(document: dict[str, Table | list[Table]]) -> str:
    """Return the tables as TOML; a JSON string or list is a TOML one too."""
    lines = []
    for name, value in document.items():
        for table in value if isinstance(value, list) else [value]:
            lines.append(f"\n[[{name}]]" if isinstance(value, list) else f"\n[{name}]")
            lines += [f"{key} = {json.dumps(setting, ensure_ascii=False)}" for key, setting in table.items()]
    return "\n".join(lines) + "\n"
