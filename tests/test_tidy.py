"""The house rules that a machine can check: sizes, purity of the core, documented words, nothing local in the tree."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path

import pytest

from narwhal.config import Config
from narwhal.section import Section

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = sorted((ROOT / "narwhal").rglob("*.py"))
CORE = sorted((ROOT / "narwhal" / "core").glob("*.py"))
PYTHON = [*PRODUCT, *sorted((ROOT / "tests").rglob("*.py"))]
GLOSSARY = ROOT / "docs" / "glossary.md"

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_USUAL = 30
USUAL_SHARE_MIN = 0.9
PARAMETERS_MAX = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions_of(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters_of(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


# Sizes: over a cap means that a noun is missing, not that a waiver is due.


def test_no_file_is_longer_than_400_lines() -> None:
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in PYTHON}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES_MAX} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    too_long = [
        f"{name_of(path)}:{function.lineno} {function.name}: {lines_of(function)} lines"
        for path in PYTHON
        for function in functions_of(path)
        if lines_of(function) > FUNCTION_LINES_MAX
    ]
    assert too_long == []


def test_nine_functions_in_ten_fit_in_30_lines() -> None:
    sizes = [lines_of(function) for path in PRODUCT for function in functions_of(path)]
    usual = sum(size <= FUNCTION_LINES_USUAL for size in sizes)
    assert usual / len(sizes) >= USUAL_SHARE_MIN


def test_no_function_takes_more_than_6_parameters() -> None:
    too_many = [
        f"{name_of(path)}:{function.lineno} {function.name}: {parameters_of(function)} parameters"
        for path in PRODUCT
        for function in functions_of(path)
        if parameters_of(function) > PARAMETERS_MAX
    ]
    assert too_many == []


# Purity. Which modules the core may import is a contract of import-linter's, in pyproject.toml.


def test_the_core_waits_for_nothing() -> None:
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in CORE
        for node in ast.walk(tree_of(path))
        if isinstance(node, waiting)
    ]
    assert found == []


# Words: what is on the wire, in logs, in metrics and in handoffs is explained.


@cache
def closed_lists() -> dict[str, type[StrEnum]]:
    """Every list of words that the core defines, by name."""
    lists: dict[str, type[StrEnum]] = {}
    for path in CORE:
        module = importlib.import_module(f"narwhal.core.{path.stem}" if path.stem != "__init__" else "narwhal.core")
        lists |= {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, StrEnum) and value.__module__ == module.__name__
        }
    return lists


def glossary_words(list_name: str) -> list[str]:
    """The words of the table under the heading of `list_name`."""
    section = re.search(rf"^### `{list_name}`.*?\n(.*?)(?=^##|\Z)", GLOSSARY.read_text(), re.DOTALL | re.MULTILINE)
    return re.findall(r"^\| `([^`]+)` \| \S", section[1], re.MULTILINE) if section else []


def test_the_core_defines_closed_lists() -> None:
    assert {"FailureClass", "HoldKind", "Stage", "Role"} <= closed_lists().keys()


@pytest.mark.parametrize("name", sorted(closed_lists()))
def test_the_glossary_explains_exactly_the_words_of(name: str) -> None:
    assert sorted(glossary_words(name)) == sorted(closed_lists()[name])


def fields_of(section: type[Section], path: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from fields_of(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", field.description


def test_every_setting_has_a_description() -> None:
    described = dict(fields_of(Config))
    assert "recovery.eject_after" in described
    assert [path for path, description in described.items() if not description] == []


# The tree: nothing in it belongs to one machine or one package index.


def tracked_texts() -> Iterator[tuple[str, str]]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: no list of tracked files")
    for name in filter(None, listed):
        path = ROOT / name
        if path.is_file():
            yield name, path.read_text(errors="replace")


REGISTRY = re.compile(r"https?://[^\s\"']*/(simple|debian)\b|https?://(registry|files)[.]|\b(pypi|pythonhosted)[.]org")


def test_no_tracked_file_names_a_package_registry() -> None:
    assert [name for name, text in tracked_texts() if REGISTRY.search(text)] == []


def test_no_tracked_file_names_a_path_of_this_machine() -> None:
    here = (f"{ROOT}/", f"{Path.home()}/")
    assert [name for name, text in tracked_texts() if any(path in text for path in here)] == []


def test_every_requirement_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", line)] == []
    pinned = {normal(line) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    own = normal(project["name"])
    assert {normal(requirement) for requirement in required} - pinned - {own} == set()


def normal(requirement: str) -> str:
    """The name in a requirement, in the one spelling that all its spellings share."""
    name = re.match(r"[\w.-]*\w", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()
