"""The commands parse, print and exit as documented, without tracebacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from narwhal import __version__
from narwhal.cli import main
from narwhal.cli.config_command import toml_value
from narwhal.cli.serve import main as serve_main
from narwhal.config import Config, parse_config
from narwhal.router import ServeOptions
from narwhal.section import Section
from narwhal.testing.stub_engine.faults import KINDS

MINIMAL = Path(__file__).with_name("minimal.toml")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NARWHAL_")]:
        monkeypatch.delenv(name)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m narwhal` as a process of its own."""
    command = [sys.executable, "-m", "narwhal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **options)


def test_version_and_help_answer_as_a_process() -> None:
    assert run("--version").stdout == f"narwhal {__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    for command in ("serve", "config", "stub-engine"):
        assert command in shown.stdout
    assert run().returncode == 2


def test_help_of_the_stub_engine_names_every_fault_and_variant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stub-engine", "--help"])
    shown = re.split(r"[^a-z0-9_]+", capsys.readouterr().out)
    for kind, spec in KINDS.items():
        assert kind in shown
        assert set(spec.variants) <= set(shown)
        assert (spec.keys - {spec.value}) <= set(shown) | {"done"}


def test_help_does_not_wait_for_heavy_imports() -> None:
    code = (
        "import sys; from narwhal.cli import build_parser; build_parser().format_help();"
        "print([name for name in ('pydantic', 'aiohttp', 'redis', 'structlog', 'rich') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert shown.stdout == "[]\n"


def test_five_mistakes_are_five_lines_on_standard_error_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        MINIMAL.read_text().replace("http://127.0.0.1:9001", "ftp://x").replace('"decode"', '"decoder"')
        + "[recovery]\neject_afer = 3\n[ha]\npoll_every_s = 0.5\n[log]\nlevel = 'loud'\n"
    )
    assert main(["config", "check", "--config", str(path)]) == 2
    output = capsys.readouterr()
    head, *lines = output.err.splitlines()
    assert output.out == ""
    assert head == f"narwhal: {path} cannot be used, 5 problems:"
    assert [line.split(": ")[0] for line in lines] == [
        "  engines.0.url", "  engines.1.role", "  recovery.eject_afer", "  log.level", "  ha.poll_every_s",
    ]  # fmt: skip


@pytest.mark.parametrize("command", [["config", "check"], ["config", "show"], ["serve"]])
def test_an_unusable_file_is_told_by_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--config", "nowhere.toml"]) == 2
    assert capsys.readouterr().err == (
        "narwhal: nowhere.toml cannot be used, 1 problem:\n  no such file; give its path with --config FILE\n"
    )


def test_check_says_what_the_file_describes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--config", str(MINIMAL), "--router-id", "router-b"]) == 0
    assert capsys.readouterr().out == (
        f"{MINIMAL}: ok (router router-b, cluster default, 1 prefill and 1 decode engines)\n"
    )


def test_the_defaults_name_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--defaults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections: list[type[Section]] = [
        annotation
        for field in Config.model_fields.values()
        for annotation in (field.annotation, *getattr(field.annotation, "__args__", ()))
        if isinstance(annotation, type) and issubclass(annotation, Section)
    ]
    assert len(sections) == len(Config.model_fields)
    for section in sections:
        for key, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{key} needs a description"
            places = [at for at, line in enumerate(lines) if re.match(rf"#?{key} = ", line)]
            assert any(lines[at - 1].startswith(f"# {field.description}") for at in places), key
    assert "# T: life of the lease without renewal; seconds; above 0" in lines


def test_the_defaults_are_accepted_once_the_required_keys_are_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["config", "show", "--defaults"])
    shown = capsys.readouterr().out
    assert parse_config({**tomllib.loads(shown), **tomllib.loads(MINIMAL.read_text())}, source="defaults") == (
        parse_config(tomllib.loads(MINIMAL.read_text()), source="minimal")
    )
    path = tmp_path / "filled.toml"
    path.write_text(re.sub(r"(?m)^#(?! )", "", shown))
    assert main(["config", "check", "--config", str(path)]) == 0


def test_the_settings_in_effect_are_shown_as_toml_that_means_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARWHAL_HA__CLUSTER", "blue")
    monkeypatch.setenv("NARWHAL_ROUTER__STATE_DIR", 'a "quoted" \\ folder\t\x7f \u00e9 \U0001f40b')
    monkeypatch.setenv("NARWHAL_PEERS", '[{"id": "router-b", "url": "http://b:8000"}]')
    assert main(["config", "show", "--config", str(MINIMAL)]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["ha"]["cluster"], shown["peers"][0]["id"]) == ("blue", "router-b")
    assert shown["router"]["state_dir"] == os.environ["NARWHAL_ROUTER__STATE_DIR"]
    assert parse_config(shown, source="shown").ha.cluster == "blue"


def test_show_wants_to_know_what() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", "show"])
    assert caught.value.code == 2


@pytest.mark.parametrize("value", [True, False, 0, -7, 0.5, 1e-05, 1e300, "", "a\nb", ["x", 'y"'], []])
def test_a_toml_value_reads_back(value: object) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}") == {"x": value}


class RecordingRouter(ModuleType):
    """Stands where the router is, and remembers what it was asked to run."""

    def __init__(self) -> None:
        super().__init__("narwhal.router")
        self.ServeOptions = ServeOptions
        self.asked: list[tuple[Config, ServeOptions]] = []

    def run(self, config: Config, options: ServeOptions) -> int:
        self.asked.append((config, options))
        return 7


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> RecordingRouter:
    """Return the router that `serve` will find, and keep the process's logging as it is."""
    module = RecordingRouter()
    monkeypatch.setitem(sys.modules, "narwhal.router", module)
    monkeypatch.setattr("narwhal.log.configure_logging", lambda **settings: None)
    return module


def test_serve_passes_settings_flags_and_secrets_on_and_returns_the_routers_code(
    router: RecordingRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARWHAL_REDIS_PASSWORD", "hunter2")
    monkeypatch.setenv("NARWHAL_ADMIN_TOKEN", "open sesame")
    flags = ["--config", str(MINIMAL), "--role", "standby", "--router-id", "router-q", "--resume"]
    assert serve_main(flags) == 7
    assert main(["serve", *flags]) == 7
    for config, options in router.asked:
        assert config.router.id == "router-q"
        assert options == ServeOptions(role="standby", resume=True, redis_password="hunter2", admin_token="open sesame")


def test_serve_competes_by_default_and_needs_a_file(router: RecordingRouter) -> None:
    assert serve_main(["--config", str(MINIMAL)]) == 7
    assert router.asked[0][1] == ServeOptions()
    with pytest.raises(SystemExit) as caught:
        serve_main([])
    assert caught.value.code == 2


@pytest.mark.parametrize("flags", [["--resume", "--fresh"], ["--solo", "--role", "standby"], ["--role", "leader"]])
def test_serve_refuses_flags_that_contradict(router: RecordingRouter, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve_main(["--config", str(MINIMAL), *flags])
    assert caught.value.code == 2
    assert router.asked == []


def test_an_interrupted_command_ends_with_130(router: RecordingRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config, options: ServeOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(router, "run", interrupted)
    assert serve_main(["--config", str(MINIMAL)]) == 130


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from narwhal.cli import main; sys.exit(main())",
            "config",
            "show",
            "--defaults",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait(timeout=30)
    assert errors == b""
    assert process.returncode == 141
