"""The whole configuration as frozen sections, named as in the source. Pure: files and environment are read in `cli`.

Each field's description is its documentation: `narwhal config show --defaults` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from narwhal.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Port = Annotated[int, Field(ge=0, le=65535)]
PositiveCount = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen group of settings; unknown keys and loose types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def http_url(value: str) -> str:
    """Return `value` without a trailing slash; raise ValueError unless it is http(s) with a host and no password."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must be an http:// or https:// address with a host, not {value!r}")
    if parts.username or parts.password:
        raise ValueError("must not carry a user or password; secrets come from the environment")
    return value.rstrip("/")


class RouterSection(Section):
    """Who this router is and where it listens."""

    id: Identifier = Field("router-a", description="stable name of this router; unique in the cluster")
    host: str = Field("127.0.0.1", min_length=1, description="address that client traffic and /ready listen on")
    port: Port = Field(8000, description="port of client traffic and /ready; 0 picks a free one")
    admin_host: str = Field(
        "127.0.0.1", min_length=1, description="address of the admin endpoints; loopback by default"
    )
    admin_port: Port = Field(8100, description="port of the admin endpoints; 0 picks a free one")
    advertise_url: str | None = Field(None, description="how peers reach the traffic port; default http://host:port")
    advertise_admin_url: str | None = Field(None, description="how peers and the CLI reach the admin port")
    state_dir: str = Field("narwhal-state", min_length=1, description="folder of the handoff file and local HA record")

    _urls = field_validator("advertise_url", "advertise_admin_url")(lambda value: http_url(value) if value else value)


class ServingSection(Section):
    """The client-facing side."""

    models: tuple[str, ...] = Field(
        min_length=1, description="model names that clients may ask for; the first is the fleet's"
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

    id: Identifier = Field(description="stable name of the engine")
    url: str = Field(description="base address, e.g. http://10.0.0.5:8000")
    role: Literal["prefill", "decode"] = Field(description="what placement may ask of it")

    _url = field_validator("url")(http_url)


class RecoverySection(Section):
    """When failure evidence leads to action, and how engines come back."""

    eject_after: PositiveCount = Field(
        3, description="streak of one failure class at which the source's action is taken"
    )
    liveness_misses: PositiveCount = Field(3, description="consecutive silent liveness sweeps that eject an engine")
    liveness_every_s: Seconds = Field(5.0, description="time between two liveness sweeps")
    liveness_timeout_s: Seconds = Field(5.0, description="deadline of one health request of a liveness sweep")
    failure_quarantine_s: Seconds | None = Field(None, description="timed hold of a failed engine; unset means none")
    retry_backoff_s: Seconds = Field(1.0, description="wait before the second probe or readmission attempt; doubles")
    retry_backoff_max_s: Seconds = Field(30.0, description="longest wait between two attempts")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.retry_backoff_max_s < self.retry_backoff_s:
            raise ValueError(
                f"retry_backoff_max_s ({self.retry_backoff_max_s}) must not be below retry_backoff_s ({self.retry_backoff_s})"
            )
        return self


class ControllerSection(Section):
    """The monitor loop."""

    pass_every_s: Seconds = Field(1.0, description="time from the start of one monitor pass to the next")
    stage_timeout_s: Seconds = Field(5.0, description="time bound of one stage of a pass")
    monitor_failure_limit: PositiveCount = Field(3, description="failed passes in a row after which admission closes")
    interval_s: Seconds = Field(10.0, description="length of the interval over which request tallies are kept")
    telemetry_every_s: Seconds = Field(5.0, description="time between two reads of the engines' own metrics")


class PeerEntry(Section):
    """Another router of the cluster."""

    id: Identifier = Field(description="its router.id")
    url: str = Field(description="address of its traffic port as seen from here")

    _url = field_validator("url")(http_url)


class HaSection(Section):
    """The pair: lease, fencing, takeover."""

    cluster: Identifier = Field("default", description="name of the cluster; part of every Redis key")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis address; a password comes from NARWHAL_REDIS_PASSWORD"
    )
    lease_ttl_s: Seconds = Field(2.0, description="T: life of the lease without renewal")
    renew_every_s: Seconds = Field(0.4, description="r: time between two renewals")
    op_timeout_s: Seconds = Field(0.3, description="o: longest wait for one Redis answer")
    margin_s: Seconds = Field(0.2, description="m: how long before expiry the holder stops admitting")
    clock_error: Annotated[float, Field(ge=0, lt=0.1, allow_inf_nan=False)] = Field(
        0.005, description="e: assumed relative error between this host's and Redis' clock rates"
    )
    poll_every_s: Seconds = Field(0.1, description="p: time between two looks of a standby at the lease")
    peer_poll_every_s: Seconds = Field(0.25, description="time between two looks of a standby at the active's /ready")
    peer_timeout_s: Seconds = Field(0.5, description="longest wait for the active's /ready")
    takeover_misses: PositiveCount = Field(3, description="signs against the active in a row before a standby claims")

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"must start with redis://, rediss:// or unix://, not {value!r}")
        if parts.password:
            raise ValueError("must not carry a password; set NARWHAL_REDIS_PASSWORD instead")
        return value

    @model_validator(mode="after")
    def _clock_arithmetic(self) -> Self:
        """Refuse settings with which the holder could believe longer than the lease lives. Source: ha.md, 2.5."""
        problems = []
        used = self.renew_every_s + 2 * self.op_timeout_s + self.margin_s + self.clock_error * self.lease_ttl_s
        if used >= self.lease_ttl_s:
            problems.append(
                f"lease_ttl_s ({self.lease_ttl_s}) must exceed renew_every_s + 2 * op_timeout_s + margin_s"
                f" + clock_error * lease_ttl_s ({used:.3f})"
            )
        if self.margin_s < 0.05:
            problems.append(f"margin_s ({self.margin_s}) must be at least 0.05")
        if self.op_timeout_s > (self.lease_ttl_s - self.margin_s) / 4:
            problems.append(
                f"op_timeout_s ({self.op_timeout_s}) must not exceed a quarter of lease_ttl_s - margin_s"
                f" ({(self.lease_ttl_s - self.margin_s) / 4:.3f})"
            )
        if self.poll_every_s > self.renew_every_s:
            problems.append(f"poll_every_s ({self.poll_every_s}) must not exceed renew_every_s ({self.renew_every_s})")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class LogSection(Section):
    """What is written to standard error."""

    format: Literal["json", "console"] = Field("json", description="one JSON object a line, or coloured text")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is written")


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

    @model_validator(mode="after")
    def _consistent_fleet(self) -> Self:
        problems = [
            *(f"engines: id {name!r} is used {n} times" for name, n in _repeated([e.id for e in self.engines])),
            *(f"engines: url {url!r} is used {n} times" for url, n in _repeated([e.url for e in self.engines])),
            *(f"peers: id {name!r} is used {n} times" for name, n in _repeated([p.id for p in self.peers])),
            *(
                f"engines: no engine has role {role!r}; a fleet needs at least one of each"
                for role in ("prefill", "decode")
                if role not in {e.role for e in self.engines}
            ),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _repeated(values: list[str]) -> list[tuple[str, int]]:
    return [(value, values.count(value)) for value in dict.fromkeys(values) if values.count(value) > 1]


def parse_config(data: Mapping[str, Any], *, source: str) -> Config:
    """Return the validated configuration.

    Raises ConfigError naming every mistake with its path, e.g. `engines.0.url: must be ...`.
    """
    try:
        return Config.model_validate(_tuples(data))
    except ValidationError as error:
        raise ConfigError([_describe(dict(item)) for item in error.errors(include_url=False)], source=source) from error


def _tuples(value: Any) -> Any:
    """Turn lists into tuples, which strict validation asks for; TOML and JSON only know lists."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _describe(item: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "(top level)"
    message = str(item["msg"]).removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            message = "unknown key"
        case "missing":
            message = "is required"
        case "value_error":
            pass
        case _:
            message = f"{message}, got {item['input']!r}"
    return f"{path}: {message}"
