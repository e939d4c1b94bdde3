"""Which cluster a command is about: arguments win over a configuration, and both over the environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from narwhal.cli.cluster import Cluster, add_cluster_arguments, find_cluster
from narwhal.errors import ConfigError

CONFIG = """
[serving]
models = ["m"]
[ha]
cluster = "from-file"
redis_url = "redis://10.0.0.5:6379/0"
[[engines]]
id = "p"
url = "http://10.0.0.1:8000"
role = "prefill"
[[engines]]
id = "d"
url = "http://10.0.0.2:8000"
role = "decode"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "narwhal.toml"
    path.write_text(CONFIG)
    return str(path)


def find(*words: str, environ: Mapping[str, str] | None = None) -> Cluster:
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    return find_cluster(parser.parse_args(words), environ or {})


def named(cluster: Cluster) -> tuple[str, str]:
    return cluster.name, cluster.ha.redis_url


def test_a_configuration_names_it(file: str) -> None:
    assert named(find("--config", file)) == ("from-file", "redis://10.0.0.5:6379/0")


def test_redis_and_cluster_name_it() -> None:
    assert named(find("--redis", "redis://a:1/0", "--cluster", "prod")) == ("prod", "redis://a:1/0")


def test_a_cluster_without_a_name_is_the_default_one() -> None:
    assert find("--redis", "redis://a:1/0").name == "default"


def test_arguments_win_over_the_configuration(file: str) -> None:
    found = find("--config", file, "--redis", "redis://127.0.0.1:16379/0")
    assert named(found) == ("from-file", "redis://127.0.0.1:16379/0")


def test_the_environment_names_a_configuration(file: str) -> None:
    assert find(environ={"NARWHAL_CONFIG": file}).name == "from-file"


def test_the_environment_names_redis_and_cluster() -> None:
    environ = {"NARWHAL_REDIS_URL": "redis://b:2/0", "NARWHAL_CLUSTER": "blue"}
    assert named(find(environ=environ)) == ("blue", "redis://b:2/0")


def test_redis_as_argument_wins_over_a_configuration_of_the_environment(file: str) -> None:
    assert named(find("--redis", "redis://a:1/0", environ={"NARWHAL_CONFIG": file})) == ("default", "redis://a:1/0")


def test_the_environment_overrides_single_settings_of_the_configuration(file: str) -> None:
    assert find("--config", file, environ={"NARWHAL_HA__CLUSTER": "green"}).name == "green"


def test_secrets_come_from_the_environment() -> None:
    found = find("--redis", "redis://a:1/0", environ={"NARWHAL_REDIS_PASSWORD": "geheim", "NARWHAL_ADMIN_TOKEN": "t"})
    assert (found.secrets.redis_password, found.secrets.admin_token) == ("geheim", "t")


def test_the_words_name_it_in_another_shell(file: str) -> None:
    assert find("--redis", "redis://a:1/0").words == ("--redis", "redis://a:1/0", "--cluster", "default")
    assert find("--config", file, "--cluster", "x").words == ("--config", file, "--cluster", "x")


def test_nothing_that_names_it_is_said_with_every_way_to() -> None:
    with pytest.raises(ConfigError, match=r"--config FILE.*--redis URL.*NARWHAL_CONFIG"):
        find()


def test_a_password_in_the_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="NARWHAL_REDIS_PASSWORD"):
        find("--redis", "redis://:secret@a:1/0")
