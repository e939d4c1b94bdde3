"""How the configuration is read: a TOML or JSON file, then the environment, then the command line.

`NARWHAL_<SECTION>__<KEY>` overrides one key, e.g. NARWHAL_RECOVERY__EJECT_AFTER=5; NARWHAL_ENGINES and NARWHAL_PEERS
replace the lists, as JSON. Secrets come from the environment only and are never part of `Config`.
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from narwhal.config import Config, parse_config
from narwhal.errors import ConfigError
from narwhal.section import Section

PREFIX: Final = "NARWHAL_"


@dataclass(frozen=True, slots=True)
class Secrets:
    """What must never be written into a file. Empty variables count as unset."""

    redis_username: str | None = None
    redis_password: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)


def read_secrets(environ: Mapping[str, str]) -> Secrets:
    """Return the secrets that `environ` carries."""
    return Secrets(
        redis_username=environ.get("NARWHAL_REDIS_USERNAME") or None,
        redis_password=environ.get("NARWHAL_REDIS_PASSWORD") or None,
        admin_token=environ.get("NARWHAL_ADMIN_TOKEN") or None,
    )


def load_config(path: Path, *, environ: Mapping[str, str], router_id: str | None = None) -> Config:
    """Return the configuration in `path` with the overrides applied; `router_id` wins over both.

    Raises ConfigError naming every mistake of file, environment and command line.
    """
    document = read_document(path)
    problems: list[str] = []
    origins: dict[str, str] = {}
    for override in _overrides(environ):
        if override.problem is None:
            _put(document, override.path, override.value)
            origins[".".join(override.path)] = override.name
        else:
            problems.append(override.problem)
    if router_id is not None:
        _put(document, ("router", "id"), router_id)
        origins["router.id"] = "--router-id"
    try:
        config = parse_config(document, source=str(path))
    except ConfigError as error:
        problems = [_with_origin(problem, origins) for problem in error.problems] + problems
    if problems:
        raise ConfigError(problems, source=str(path))
    return config


def read_document(path: Path) -> dict[str, Any]:
    """Return the tables in `path`, which ends in .toml or .json. Raises ConfigError; for bad syntax it has the line."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(["the name must end in .toml or .json, which says how it is read"], source=str(path))
    text = _read_text(path)
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        raise ConfigError([problem], source=str(path)) from error
    except ValueError as error:
        kind = path.suffix.removeprefix(".").upper()
        raise ConfigError([f"not valid {kind}: {error}"], source=str(path)) from error
    except RecursionError as error:
        raise ConfigError(
            ["is nested too deeply; no setting needs more than three levels"], source=str(path)
        ) from error
    if not isinstance(document, dict):
        raise ConfigError([f"must hold an object with sections, not {_shown(document)}"], source=str(path))
    return document


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(["no such file; give its path with --config FILE"], source=str(path)) from error
    except IsADirectoryError as error:
        raise ConfigError(["is a directory; give the path of a file in it"], source=str(path)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"cannot be read: {reason}"], source=str(path)) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"is not UTF-8 text: byte 0x{content[error.start]:02x} in line {line}; save it as UTF-8"
        raise ConfigError([problem], source=str(path)) from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object as TOML does: a key that appears twice is a mistake, not an override."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice in one object")
        found[key] = value
    return found


@dataclass(frozen=True, slots=True)
class _Override:
    name: str
    path: tuple[str, ...] = ()
    value: Any = None
    problem: str | None = None


def _overrides(environ: Mapping[str, str]) -> Iterator[_Override]:
    for name in sorted(environ):
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and ("__" in key or key in ("engines", "peers")):
            yield _override(name, tuple(key.split("__", 1)), environ[name])


def _override(name: str, path: tuple[str, ...], text: str) -> _Override:
    try:
        return _Override(name, path, _typed(text, _annotation(path)))
    except KeyError:
        return _Override(name, problem=f"{name}: there is no setting {'.'.join(path)!r}; unset it or mend its name")
    except ValueError as error:
        return _Override(name, problem=f"{name}: {error}, got {_shown(text)}")


def _annotation(path: tuple[str, ...]) -> Any:
    """Return the declared type of the setting at `path`. Raises KeyError when there is none."""
    section: type[Section] = Config
    for part in path[:-1]:
        inner = section.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            raise KeyError(part)
        section = inner
    return section.model_fields[path[-1]].annotation


def _typed(text: str, annotation: Any) -> Any:
    """Return `text` as the type that the setting has. Raises ValueError saying what it must be."""
    kinds = _kinds(annotation)
    if type(None) in kinds and text == "":
        return None
    if bool in kinds:
        if text.lower() not in _BOOLS:
            raise ValueError("must be true or false")
        return _BOOLS[text.lower()]
    for kind, words in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"must be {words}") from None
    if tuple in kinds:
        return _json_list(text)
    return text


_BOOLS: Final = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _kinds(annotation: Any) -> set[type]:
    """Return the plain types in a declared type: float | None -> {float, NoneType}."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(member) for member in typing.get_args(annotation)))
    return {origin or annotation}


def _json_list(text: str) -> list[Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(text, object_pairs_hook=_distinct)
        if isinstance(value, list):
            return value
    raise ValueError('must be a JSON list, e.g. ["a", "b"]')


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the value at `path`; a section that is not a table is left to be reported as it is."""
    table: Any = document
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return
    table[path[-1]] = value


def _with_origin(problem: str, origins: Mapping[str, str]) -> str:
    path = problem.partition(": ")[0]
    for prefix, name in origins.items():
        if path == prefix or path.startswith(prefix + "."):
            return f"{problem} (from {name})"
    return problem


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
