"""The whole configuration as frozen sections, named as in the source. Pure: files and environment are read in `cli`.

Each field's description is its documentation: `narwhal config show --defaults` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from narwhal.section import Rule, Section, parse_section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Port = Annotated[int, Field(ge=0, le=65535)]
PositiveCount = Annotated[int, Field(ge=1)]


def http_url(value: str) -> str:
    """Return `value` without a trailing slash; raise ValueError unless it is http(s) with a host and no password."""
    parts = urlsplit(value)
    if parts.username or parts.password:
        raise ValueError("must not carry a user or password; secrets come from the environment")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(char.isspace() for char in value):
        raise ValueError(f"must be an http:// or https:// address with a host, not {value!r}")
    if parts.port == 0:
        raise ValueError("must not name port 0, which nobody can reach")
    return value.rstrip("/")


def _ports_differ(host: str, port: int, admin_host: str, admin_port: int) -> Iterator[str]:
    if port == admin_port != 0 and host == admin_host:
        yield f"admin_port: must not be the traffic port ({port}) on the same address"


class RouterSection(Section):
    """Who this router is and where it listens."""

    id: Identifier = Field("router-a", description="stable name of this router; unique in the cluster")
    host: str = Field("127.0.0.1", min_length=1, description="address that client traffic and /ready listen on")
    port: Port = Field(8000, description="port of client traffic and /ready; 0 picks a free one")
    admin_host: str = Field(
        "127.0.0.1", min_length=1, description="address of the admin endpoints; loopback by default"
    )
    admin_port: Port = Field(8100, description="port of the admin endpoints; 0 picks a free one")
    advertise_url: str | None = Field(
        None,
        description="how peers reach the traffic port; unset means http://host:port",
        examples=["http://10.0.0.1:8000"],
    )
    advertise_admin_url: str | None = Field(
        None,
        description="how peers and the CLI reach the admin port; unset means http://admin_host:admin_port",
        examples=["http://10.0.0.1:8100"],
    )
    state_dir: str = Field("narwhal-state", min_length=1, description="folder of the handoff file and local HA record")

    rules = (Rule(("host", "port", "admin_host", "admin_port"), _ports_differ),)

    _urls = field_validator("advertise_url", "advertise_admin_url")(lambda value: http_url(value) if value else value)


class ServingSection(Section):
    """The client-facing side."""

    models: tuple[str, ...] = Field(
        min_length=1,
        description="model names that clients may ask for; the first is the fleet's",
        examples=[["my-model"]],
    )
    max_connections: PositiveCount = Field(
        1024, description="bound of the data connection pool (prefill, decode, token counting)"
    )
    max_body_bytes: PositiveCount = Field(64 * 1024 * 1024, description="largest accepted request body; above it 413")
    request_timeout_s: Seconds = Field(600.0, description="deadline of a whole request, queueing included")
    prefill_timeout_s: Seconds = Field(300.0, description="longest wait for a prefill answer")
    first_token_timeout_s: Seconds = Field(60.0, description="longest wait for the first real token of a decode stream")
    stream_silence_timeout_s: Seconds = Field(60.0, description="longest silence between two tokens of a decode stream")
    graceful_timeout_s: Seconds = Field(60.0, description="how long a stopping router lets its streams finish")
    whole_requests: Literal["decode", "refuse"] = Field(
        "decode", description="requests that cannot be split (n > 1, prompt lists): whole to a decode engine, or 501"
    )


class EngineSection(Section):
    """How engines are spoken to."""

    control_connections: PositiveCount = Field(
        16, description="bound of the control pool (health, probes, readmission)"
    )
    connect_timeout_s: Seconds = Field(2.0, description="longest wait for a TCP connection to an engine")
    keepalive_s: Seconds = Field(
        3.0, description="idle time after which a pooled connection is closed; below vLLM's 5 s"
    )
    kv_lease_s: Seconds = Field(
        30.0, description="how long a prefill engine keeps the KV of a ticket; two thirds are used"
    )
    health_timeout_s: Seconds = Field(2.0, description="deadline of one health request")
    probe_timeout_s: Seconds = Field(15.0, description="deadline of one leg of an inference probe")


class EngineEntry(Section):
    """One engine of the fleet."""

    id: Identifier = Field(description="stable name of the engine", examples=["prefill-1", "decode-1"])
    url: str = Field(description="base address", examples=["http://10.0.0.5:8000", "http://10.0.0.6:8000"])
    role: Literal["prefill", "decode"] = Field(
        description="what placement may ask of it", examples=["prefill", "decode"]
    )

    _url = field_validator("url")(http_url)


def _backoff_grows(first: float, longest: float) -> Iterator[str]:
    if longest < first:
        yield f"retry_backoff_max_s: must not be below retry_backoff_s ({first}), got {longest}"


class RecoverySection(Section):
    """When failure evidence leads to action, and how engines come back."""

    eject_after: PositiveCount = Field(
        3, description="streak of one failure class at which the source's action is taken"
    )
    liveness_misses: PositiveCount = Field(3, description="consecutive silent liveness sweeps that eject an engine")
    liveness_every_s: Seconds = Field(5.0, description="time between two liveness sweeps")
    liveness_timeout_s: Seconds = Field(5.0, description="deadline of one health request of a liveness sweep")
    failure_quarantine_s: Seconds | None = Field(
        None, description="timed hold of a failed engine; unset means none", examples=[60.0]
    )
    retry_backoff_s: Seconds = Field(1.0, description="wait before the second probe or readmission attempt; doubles")
    retry_backoff_max_s: Seconds = Field(30.0, description="longest wait between two attempts")

    rules = (Rule(("retry_backoff_s", "retry_backoff_max_s"), _backoff_grows),)


class ControllerSection(Section):
    """The monitor loop."""

    pass_every_s: Seconds = Field(1.0, description="time from the start of one monitor pass to the next")
    stage_timeout_s: Seconds = Field(5.0, description="time bound of one stage of a pass")
    monitor_failure_limit: PositiveCount = Field(3, description="failed passes in a row after which admission closes")
    interval_s: Seconds = Field(10.0, description="length of the interval over which request tallies are kept")
    telemetry_every_s: Seconds = Field(5.0, description="time between two reads of the engines' own metrics")


class PeerEntry(Section):
    """Another router of the cluster."""

    id: Identifier = Field(description="its router.id", examples=["router-b"])
    url: str = Field(description="address of its traffic port as seen from here", examples=["http://10.0.0.2:8000"])

    _url = field_validator("url")(http_url)


def _lease_outlives_renewal(ttl: float, renew: float, op: float, margin: float, error: float) -> Iterator[str]:
    used = renew + 2 * op + margin + error * ttl
    if used >= ttl:
        yield (
            "lease_ttl_s: must exceed renew_every_s + 2 * op_timeout_s + margin_s + clock_error * lease_ttl_s"
            f" ({used:.3f}), got {ttl}"
        )


def _operations_are_short(op: float, ttl: float, margin: float) -> Iterator[str]:
    if op > (quarter := (ttl - margin) / 4):
        yield f"op_timeout_s: must not exceed a quarter of lease_ttl_s - margin_s ({quarter:.3f}), got {op}"


def _polls_see_every_renewal(poll: float, renew: float) -> Iterator[str]:
    if poll > renew:
        yield f"poll_every_s: must not exceed renew_every_s ({renew}), got {poll}"


class HaSection(Section):
    """The pair: lease, fencing, takeover."""

    cluster: Identifier = Field("default", description="name of the cluster; part of every Redis key")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis address; a password comes from NARWHAL_REDIS_PASSWORD"
    )
    lease_ttl_s: Seconds = Field(2.0, description="T: life of the lease without renewal")
    renew_every_s: Seconds = Field(0.4, description="r: time between two renewals")
    op_timeout_s: Seconds = Field(0.3, description="o: longest wait for one Redis answer")
    margin_s: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] = Field(
        0.2, description="m: how long before expiry the holder stops admitting"
    )
    clock_error: Annotated[float, Field(ge=0, lt=0.1, allow_inf_nan=False)] = Field(
        0.005, description="e: assumed relative error between this host's and Redis' clock rates"
    )
    poll_every_s: Seconds = Field(0.1, description="p: time between two looks of a standby at the lease")
    peer_poll_every_s: Seconds = Field(0.25, description="time between two looks of a standby at the active's /ready")
    peer_timeout_s: Seconds = Field(0.5, description="longest wait for the active's /ready")
    takeover_misses: PositiveCount = Field(3, description="signs against the active in a row before a standby claims")
    peers_direct: bool = Field(
        False,
        description="no proxy or NAT stands between the routers, so that a cut lifeline and refused connections prove"
        " the active's death",
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.password:
            raise ValueError("must not carry a password; set NARWHAL_REDIS_PASSWORD instead")
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"must start with redis://, rediss:// or unix://, not {value!r}")
        return value

    # With settings that break these the holder could believe longer than the lease lives. Source: ha.md, 2.5.
    rules = (
        Rule(("lease_ttl_s", "renew_every_s", "op_timeout_s", "margin_s", "clock_error"), _lease_outlives_renewal),
        Rule(("op_timeout_s", "lease_ttl_s", "margin_s"), _operations_are_short),
        Rule(("poll_every_s", "renew_every_s"), _polls_see_every_renewal),
    )


class LogSection(Section):
    """What is written to standard error."""

    format: Literal["json", "console"] = Field("json", description="one JSON object a line, or coloured text")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is written")


# The fleet rules see each entry as a mapping that lacks the keys which are invalid by themselves.
_Entries = Sequence[Mapping[str, Any]]


def _engines_are_distinct(engines: _Entries) -> Iterator[str]:
    yield from _repeated("engines", "id", [entry["id"] for entry in engines if "id" in entry])
    yield from _repeated("engines", "url", [http_url(entry["url"]) for entry in engines if "url" in entry])


def _both_roles_are_there(engines: _Entries) -> Iterator[str]:
    roles = {entry.get("role") for entry in engines}
    if None not in roles:
        for role in sorted({"prefill", "decode"} - roles):
            yield f"engines: no engine has role {role!r}; a fleet needs at least one of each"


def _peers_are_distinct(peers: _Entries) -> Iterator[str]:
    yield from _repeated("peers", "id", [entry["id"] for entry in peers if "id" in entry])


def _repeated(path: str, key: str, values: list[str]) -> Iterator[str]:
    for value in dict.fromkeys(values):
        if (times := values.count(value)) > 1:
            yield f"{path}: {key} {value!r} is used {times} times"


class Config(Section):
    """Everything that `narwhal-serve --config FILE` needs."""

    serving: ServingSection
    engines: tuple[EngineEntry, ...] = Field(min_length=1, description="the fleet")
    router: RouterSection = RouterSection()
    engine: EngineSection = EngineSection()
    recovery: RecoverySection = RecoverySection()
    controller: ControllerSection = ControllerSection()
    ha: HaSection = HaSection()
    peers: tuple[PeerEntry, ...] = Field((), description="the other routers; they are also found through Redis")
    log: LogSection = LogSection()

    rules = (
        Rule(("engines",), _engines_are_distinct),
        Rule(("engines",), _both_roles_are_there),
        Rule(("peers",), _peers_are_distinct),
    )


def parse_config(data: Mapping[str, Any], *, source: str) -> Config:
    """Return the validated configuration.

    Raises ConfigError naming every mistake with its path, e.g. `engines.0.url: must be ...`.
    """
    return parse_section(Config, data, source=source)
