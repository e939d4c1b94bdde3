"""Configuration is read from file, environment and command line, and every mistake is named with its path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.cli.settings import Secrets, load_config, read_secrets
from narwhal.config import Config, HaSection, parse_config
from narwhal.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "serving": {"models": ["m"]},
    "engines": [
        {"id": "p1", "url": "http://127.0.0.1:9001", "role": "prefill"},
        {"id": "d1", "url": "http://127.0.0.1:9002", "role": "decode"},
    ],
}
MINIMAL_TOML = """
[serving]
models = ["m"]
[[engines]]
id = "p1"
url = "http://127.0.0.1:9001"
role = "prefill"
[[engines]]
id = "d1"
url = "http://127.0.0.1:9002"
role = "decode"
"""


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def problems_of(data: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, source="test")
    return caught.value.problems


def load_problems(
    path: Path, *, environ: dict[str, str] | None = None, router_id: str | None = None
) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ=environ or {}, router_id=router_id)
    assert caught.value.source == str(path)
    return caught.value.problems


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    from_toml = load_config(written(tmp_path, "a.toml", MINIMAL_TOML), environ={})
    from_json = load_config(written(tmp_path, "a.json", json.dumps(MINIMAL)), environ={})
    assert from_toml == from_json
    assert from_toml.serving.models == ("m",)


def test_five_mistakes_are_named_with_their_paths() -> None:
    problems = problems_of(
        {
            "serving": {"models": ["m"], "max_connections": "many"},
            "engines": [
                {"id": "p1", "url": "ftp://x", "role": "prefill"},
                {"id": "d1", "url": "http://x:1", "role": "decoder"},
            ],
            "recovery": {"eject_afer": 3},
            "ha": {"lease_ttl_s": 0.5},
        }
    )
    assert [problem.split(": ")[0] for problem in problems] == [
        "serving.max_connections",
        "engines.0.url",
        "engines.1.role",
        "recovery.eject_afer",
        "ha.lease_ttl_s",
        "ha.op_timeout_s",
    ]
    assert problems[3] == "recovery.eject_afer: unknown key"


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"ha": {"renew_every_s": 1.3}}, "ha.lease_ttl_s: must exceed renew_every_s"),
    ({"ha": {"op_timeout_s": 0.46}}, "ha.op_timeout_s: must not exceed a quarter"),
    ({"ha": {"poll_every_s": 0.5}}, "ha.poll_every_s: must not exceed renew_every_s (0.4)"),
    ({"recovery": {"retry_backoff_max_s": 0.5}}, "recovery.retry_backoff_max_s: must not be below retry_backoff_s"),
    ({"router": {"admin_port": 8000}}, "router.admin_port: must not be the traffic port"),
]


@pytest.mark.parametrize(("change", "words"), CONTRADICTIONS, ids=[words.split(":")[0] for _, words in CONTRADICTIONS])
def test_a_contradiction_is_named_alone_and_beside_an_invalid_setting(change: dict[str, Any], words: str) -> None:
    (problem,) = problems_of({**MINIMAL, **change})
    assert problem.startswith(words)
    (section,) = change
    beside = problems_of({**MINIMAL, section: {**change[section], "nonsense": 1}, "log": {"level": "loud"}})
    assert [one.split(": ")[0] for one in beside] == [f"{section}.nonsense", "log.level", words.split(":")[0]]


def test_a_contradiction_with_an_invalid_setting_is_not_made_up() -> None:
    assert problems_of({**MINIMAL, "ha": {"lease_ttl_s": "short", "renew_every_s": 5.0}}) == (
        "ha.lease_ttl_s: must be a number, got 'short'",
    )


def test_sections_refuse_contradictions_also_when_built_alone() -> None:
    with pytest.raises(ValueError, match="poll_every_s"):
        HaSection(poll_every_s=0.5)


FLEETS: list[tuple[list[Any], tuple[str, ...]]] = [
    ([], ("engines: must not be empty, got ()",)),
    ([3], ("engines.0: must be a table, got 3",)),
    (
        [{"id": "a", "url": "http://x:1", "role": "prefill"}, 3],
        ("engines.1: must be a table, got 3",),
    ),
    (
        [{"id": "a", "url": "http://x:1", "role": "prefill"}],
        ("engines: no engine has role 'decode'; a fleet needs at least one of each",),
    ),
    (
        [
            {"id": "a", "url": "http://x:1", "role": "prefill"},
            {"id": "a", "url": "http://x:1/", "role": "decode"},
            {"id": "b", "url": "http://x:1", "role": "wizard"},
        ],
        (
            "engines.2.role: must be 'prefill' or 'decode', got 'wizard'",
            "engines: id 'a' is used 2 times",
            "engines: url 'http://x:1' is used 3 times",
        ),
    ),
    (
        [{"id": "a b", "role": "prefill"}, {"id": "c", "url": "http://user:pw@x:1", "role": "decode"}],
        (
            "engines.0.id: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$', got 'a b'",
            "engines.0.url: is required",
            "engines.1.url: must not carry a user or password; secrets come from the environment",
        ),
    ),
]


@pytest.mark.parametrize(("engines", "expected"), FLEETS)
def test_mistakes_in_the_fleet_are_named_without_spurious_ones(engines: list[Any], expected: tuple[str, ...]) -> None:
    assert problems_of({**MINIMAL, "engines": engines}) == expected


@pytest.mark.parametrize("url", ["http://", "http://h:99999", "http://h:0", "http://a b", "x", "http://[::1"])
def test_an_address_that_nobody_can_reach_is_refused(url: str) -> None:
    engines = [{**MINIMAL["engines"][0], "url": url}, MINIMAL["engines"][1]]
    (problem,) = problems_of({**MINIMAL, "engines": engines})
    assert problem.startswith("engines.0.url: ")


def test_a_redis_address_with_a_password_is_refused_without_repeating_it() -> None:
    (problem,) = problems_of({**MINIMAL, "ha": {"redis_url": "redis://:hunter2@h/0"}})
    assert problem == "ha.redis_url: must not carry a password; set NARWHAL_REDIS_PASSWORD instead"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "[serving\nmodels = 1", "not valid TOML: Expected ']'"),
        ("b.toml", "x = 1\ny = ]", "(at line 2, column 5)"),
        ("c.toml", "x = 1\nx = 2", "not valid TOML"),
        ("d.json", '{\n "serving": }', "not valid JSON: Expecting value (at line 2, column 13)"),
        ("e.json", '{"log": {}, "log": {}}', "not valid JSON: key 'log' appears twice"),
        ("f.json", "[1]", "must hold an object with sections, not [1]"),
        ("g.json", "[" * 100_000, "nested too deeply"),
        ("h.json", "9" * 5000, "not valid JSON"),
        ("i.toml", b'x = "\xff"', "is not UTF-8 text: byte 0xff in line 1"),
        ("j.yaml", "a: 1", "must end in .toml or .json"),
        ("k", "", "must end in .toml or .json"),
        ("l.toml", "", "serving: is required"),
    ],
)
def test_an_unusable_file_is_one_clear_line(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    problem, *_ = load_problems(written(tmp_path, name, content))
    assert words in problem


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = written(tmp_path, "bom.toml", b"\xef\xbb\xbf" + MINIMAL_TOML.encode())
    assert load_config(path, environ={}).serving.models == ("m",)


def test_missing_directory_and_unreadable_files_are_told_apart(tmp_path: Path) -> None:
    assert load_problems(tmp_path / "no.toml") == ("no such file; give its path with --config FILE",)
    (tmp_path / "folder.toml").mkdir()
    assert load_problems(tmp_path / "folder.toml") == ("is a directory; give the path of a file in it",)
    assert load_problems(tmp_path / "nul\0.toml")[0].startswith("cannot be read: ")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    assert load_problems(tmp_path / "loop.toml")[0].startswith("cannot be read: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, "closed.toml", MINIMAL_TOML)
    path.chmod(0)
    assert load_problems(path) == ("cannot be read: Permission denied",)


def test_the_environment_overrides_with_the_type_of_the_setting(tmp_path: Path) -> None:
    environ = {
        "NARWHAL_RECOVERY__EJECT_AFTER": "5",
        "NARWHAL_RECOVERY__FAILURE_QUARANTINE_S": "7.5",
        "NARWHAL_HA__CLUSTER": "blue",
        "NARWHAL_HA__LEASE_TTL_S": "3",
        "NARWHAL_LOG__FORMAT": "console",
        "NARWHAL_SERVING__MODELS": '["x", "y"]',
        "NARWHAL_PEERS": '[{"id": "router-b", "url": "http://b:8000"}]',
        "NARWHAL_TEST_REDIS_URL": "not a setting",
        "OTHER__THING": "not ours",
    }
    config = load_config(written(tmp_path, "a.toml", MINIMAL_TOML), environ=environ, router_id="router-z")
    assert config.recovery.eject_after == 5
    assert config.recovery.failure_quarantine_s == 7.5
    assert (config.ha.cluster, config.ha.lease_ttl_s) == ("blue", 3.0)
    assert config.log.format == "console"
    assert config.serving.models == ("x", "y")
    assert config.peers[0].id == "router-b"
    assert config.router.id == "router-z"


def test_an_empty_variable_unsets_what_may_be_unset(tmp_path: Path) -> None:
    path = written(tmp_path, "a.toml", MINIMAL_TOML + "[recovery]\nfailure_quarantine_s = 9.0\n")
    environ = {"NARWHAL_RECOVERY__FAILURE_QUARANTINE_S": ""}
    assert load_config(path, environ=environ).recovery.failure_quarantine_s is None


def test_bad_overrides_are_named_by_their_variables_with_all_else(tmp_path: Path) -> None:
    path = written(tmp_path, "a.toml", MINIMAL_TOML + "[log]\nlevel = 'loud'\n")
    environ = {
        "NARWHAL_RECOVERY__EJECT_AFTER": "five",
        "NARWHAL_RECOVERY__LIVENESS_MISSES": "0",
        "NARWHAL_HA__LEASE_TTL_S": "0.1",
        "NARWHAL_HA__NO_SUCH": "1",
        "NARWHAL_NOWHERE__X": "1",
        "NARWHAL_ROUTER__ID__X": "1",
        "NARWHAL_SERVING__MODELS": "x",
        "NARWHAL_LOG__FORMAT": "xml",
    }
    problems = load_problems(path, environ=environ, router_id="not an id")
    expected = [
        "router.id: String should match pattern",
        "recovery.liveness_misses: must be greater than or equal to 1, got 0 (from NARWHAL_RECOVERY__LIVENESS_MISSES)",
        "ha.lease_ttl_s: must exceed",
        "log.format: must be 'json' or 'console', got 'xml' (from NARWHAL_LOG__FORMAT)",
        "log.level: must be 'debug', 'info', 'warning' or 'error', got 'loud'",
        "NARWHAL_HA__NO_SUCH: there is no setting 'ha.no_such'",
        "NARWHAL_NOWHERE__X: there is no setting 'nowhere.x'",
        "NARWHAL_RECOVERY__EJECT_AFTER: must be a whole number, got 'five'",
        "NARWHAL_ROUTER__ID__X: there is no setting",
        "NARWHAL_SERVING__MODELS: must be a JSON list",
    ]
    for words in expected:
        assert any(problem.startswith(words) for problem in problems), words
    assert any(problem.endswith("(from --router-id)") for problem in problems)


def test_an_override_of_a_section_that_is_no_table_leaves_the_mistake_named(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", json.dumps({**MINIMAL, "ha": 3}))
    assert load_problems(path, environ={"NARWHAL_HA__CLUSTER": "x"}) == ("ha: must be a table, got 3",)


def test_secrets_come_from_the_environment_and_are_not_shown() -> None:
    environ = {
        "NARWHAL_REDIS_USERNAME": "narwhal",
        "NARWHAL_REDIS_PASSWORD": "hunter2",
        "NARWHAL_ADMIN_TOKEN": "",
    }
    secrets = read_secrets(environ)
    assert secrets == Secrets(redis_username="narwhal", redis_password="hunter2", admin_token=None)
    assert "hunter2" not in repr(secrets)
    assert read_secrets({}) == Secrets()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
SECTIONS = list(Config.model_fields)
KEYS = sorted({key for name in SECTIONS for key in getattr(Config.model_fields[name].annotation, "model_fields", {})})
ENTRIES = st.fixed_dictionaries(
    {}, optional={"id": junk | st.just("a"), "url": junk | st.just("http://a:1"), "role": junk | st.just("prefill")}
)
near_misses = st.dictionaries(
    st.sampled_from(SECTIONS),
    junk | st.dictionaries(st.sampled_from(KEYS), junk, max_size=5) | st.lists(junk | ENTRIES, max_size=4),
    max_size=6,
)


def judge(read: Callable[[], Config]) -> Config | tuple[str, ...]:
    """Return the configuration or the problems; anything else is raised."""
    try:
        return read()
    except ConfigError as error:
        return error.problems


@given(st.dictionaries(st.text(max_size=8), junk, max_size=4) | near_misses)
def test_any_tables_are_a_config_or_a_config_error(data: dict[str, Any]) -> None:
    for document in (data, {**MINIMAL, **data}):
        judged = judge(partial(parse_config, document, source="junk"))
        if not isinstance(judged, Config):
            assert judged
            assert all(": " in problem and len(problem.splitlines()) == 1 for problem in judged)


@given(st.lists(st.tuples(st.sampled_from(SECTIONS), st.sampled_from([*KEYS, "x"]), st.text(max_size=8)), max_size=4))
def test_any_environment_is_a_config_or_a_config_error(overrides: list[tuple[str, str, str]]) -> None:
    path = Path(__file__).with_name("minimal.toml")
    environ = {f"NARWHAL_{section}__{key}".upper(): text for section, key, text in overrides}
    judged = judge(lambda: load_config(path, environ=environ))
    assert isinstance(judged, Config) or judged
