"""What the documents tell people to type, follow or set exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from narwhal.cli import build_parser
from narwhal.cli.settings import load_config
from narwhal.config import Config, parse_config
from narwhal.section import Section

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS_FILES = [*DOCUMENTS, ROOT / "docker-compose.yml"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def commands(document: Path) -> Iterator[list[str]]:
    """The commands after `$ ` in console blocks, each part of a pipeline for itself."""
    for block in blocks(document, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith("$ "):
                continue
            lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            part: list[str] = []
            for word in lexer:
                if re.fullmatch(r"[|&;]+", word):
                    yield part
                    part = []
                else:
                    part.append(word)
            yield part


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def services() -> set[str]:
    body = (ROOT / "docker-compose.yml").read_text().partition("\nservices:\n")[2].partition("\nvolumes:\n")[0]
    return set(re.findall(r"^  ([a-z0-9-]+):$", body, re.MULTILINE))


def problem_with(argv: list[str]) -> str | None:
    """Why a command cannot work, or None: it is fine, or it is not ours to judge."""
    while argv and re.fullmatch(r"[A-Z_]+=.*", argv[0]):
        argv = argv[1:]
    match argv:
        case ["make", *rest]:
            return problem_with_make(rest)
        case ["narwhal-serve" | ".venv/bin/narwhal-serve", *rest]:
            return problem_with_arguments(["serve", *rest])
        case ["narwhal" | ".venv/bin/narwhal", *rest]:
            return problem_with_arguments(rest)
        case ["docker", "compose", *rest] | ["docker-compose", *rest]:
            return problem_with_compose(rest)
        case _:
            return None


def problem_with_make(words: list[str]) -> str | None:
    more = [word.partition("=")[2] for word in words if word.startswith("ARGS=")]
    called = [word for word in words if "=" not in word]
    if missing := set(called) - targets():
        return f"no such target: {missing}"
    return problem_with_arguments(["demo", *shlex.split(more[0])]) if more and called == ["demo"] else None


def problem_with_arguments(argv: list[str]) -> str | None:
    try:
        build_parser().parse_args(argv)
    except SystemExit as stop:
        return f"narwhal does not understand {argv}" if stop.code else None
    return None


def problem_with_compose(words: list[str]) -> str | None:
    match words:
        case ["exec", service, *inner]:
            return problem_with(inner) if service in services() else f"no such service: {service}"
        case ["kill" | "stop" | "start" | "restart" | "logs", *named]:
            missing = {word for word in named if not word.startswith("-")} - services()
            return f"no such service: {missing}" if missing else None
        case _:
            return None


@documents
def test_every_command_is_understood(document: Path) -> None:
    assert [problem for argv in commands(document) if (problem := problem_with(argv))] == []


def test_the_readme_shows_the_two_commands_that_do_all() -> None:
    shown = list(commands(ROOT / "README.md"))
    assert ["make", "demo"] in shown
    assert ["make", "test"] in shown


def slugs(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in slugs(target)):
            broken.append(link)
    assert broken == []


def sections() -> dict[str, type[Section]]:
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)}


def setting_exists(section: str, key: str) -> bool:
    return section in sections() and key in sections()[section].model_fields


@pytest.mark.parametrize("document", SETTINGS_FILES, ids=name_of)
def test_every_setting_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    named = [path.split(".") for path in re.findall(rf"`((?:{'|'.join(sections())})\.[a-z_]+)`", text)]
    named += [name.lower().split("__", 1) for name in re.findall(r"\bNARWHAL_([A-Z]+__[A-Z_]+)\b", text)]
    assert [".".join(path) for path in named if not setting_exists(*path)] == []


@documents
def test_every_example_configuration_is_valid(document: Path) -> None:
    for block in blocks(document, "toml"):
        parse_config(tomllib.loads(block), source=name_of(document))


@pytest.mark.parametrize("router", ["router-a", "router-b"])
def test_the_fleet_of_the_compose_file_is_valid_for(router: str) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    environ = dict(re.findall(rf"(NARWHAL_ROUTER__\w+): (http://{router}:\d+)", text))
    config = load_config(ROOT / "ops" / "narwhal.toml", environ=environ, router_id=router)
    assert config.router.advertise_url == f"http://{router}:8000"
    assert {entry.id for entry in config.engines} <= services()
