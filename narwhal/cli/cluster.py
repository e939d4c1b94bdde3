"""How a command finds the cluster that it is about: by configuration, by Redis address and name, or by environment."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from narwhal.errors import ConfigError

if TYPE_CHECKING:
    from narwhal.cli.settings import Secrets
    from narwhal.config import HaSection
    from narwhal.store.opening import RedisStores

OP_TIMEOUT_S: Final = 2.0
"""A person waits longer for Redis than a lease may."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cluster and the secrets to reach it. `words` are the arguments that name it in another shell."""

    ha: HaSection
    secrets: Secrets
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.ha.cluster


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a cluster."""
    group = parser.add_argument_group(
        "cluster", "A configuration, or Redis and a name; each may come from the environment."
    )
    group.add_argument("--config", metavar="FILE", type=Path, help="a router's configuration (default: NARWHAL_CONFIG)")
    group.add_argument("--redis", metavar="URL", help="Redis address (default: NARWHAL_REDIS_URL)")
    group.add_argument("--cluster", metavar="NAME", help="name of the cluster (default: NARWHAL_CLUSTER, or 'default')")


def find_cluster(args: argparse.Namespace, environ: Mapping[str, str]) -> Cluster:
    """Return the cluster that the arguments and `environ` name; `--redis` and `--cluster` win over a configuration.

    Raises ConfigError when nothing names one, or what does is wrong.
    """
    from narwhal.cli.settings import load_config, read_secrets

    file: Path | None = args.config
    if file is None and args.redis is None and environ.get("NARWHAL_CONFIG"):
        file = Path(environ["NARWHAL_CONFIG"])
    if file is not None:
        ha = load_config(file, environ=environ).ha
        words = ("--config", str(file))
        return Cluster(_with_arguments(ha, args), read_secrets(environ), words + _named(args))
    url = args.redis or environ.get("NARWHAL_REDIS_URL")
    name = args.cluster or environ.get("NARWHAL_CLUSTER") or "default"
    if not url:
        raise ConfigError(
            [
                "which cluster? Give --config FILE, or --redis URL and --cluster NAME;"
                " NARWHAL_CONFIG, NARWHAL_REDIS_URL and NARWHAL_CLUSTER in the environment do as well"
            ],
            source="the command line",
        )
    ha = _section({"redis_url": url, "cluster": name})
    return Cluster(ha, read_secrets(environ), ("--redis", url, "--cluster", name))


@asynccontextmanager
async def opened(cluster: Cluster) -> AsyncIterator[RedisStores]:
    """Give the stores of `cluster`, closed afterwards."""
    from narwhal.store.opening import open_redis

    stores = open_redis(
        cluster.ha.model_copy(update={"op_timeout_s": OP_TIMEOUT_S}),
        client_name="narwhal-cli",
        username=cluster.secrets.redis_username,
        password=cluster.secrets.redis_password,
    )
    try:
        yield stores
    finally:
        await stores.aclose()


def command_line(*words: str) -> str:
    """Return `words` as one would type them into a shell."""
    return shlex.join(words)


def _with_arguments(ha: HaSection, args: argparse.Namespace) -> HaSection:
    given = {key: value for key, value in (("redis_url", args.redis), ("cluster", args.cluster)) if value}
    return _section({**ha.model_dump(), **given}) if given else ha


def _section(settings: Mapping[str, Any]) -> HaSection:
    from narwhal.config import HaSection
    from narwhal.section import parse_section

    return parse_section(HaSection, settings, source="the command line")


def _named(args: argparse.Namespace) -> tuple[str, ...]:
    pairs = (("--redis", args.redis), ("--cluster", args.cluster))
    return tuple(word for flag, value in pairs if value for word in (flag, value))
