"""`narwhal config`: look at the settings, and check a file before a router is started with it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from narwhal.section import Section

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add `narwhal config show` and `narwhal config check`."""
    parser = subparsers.add_parser("config", help="show or check the configuration")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    show = actions.add_parser("show", help="print the settings in effect, or every key with default and meaning")
    what = show.add_mutually_exclusive_group(required=True)
    what.add_argument("--defaults", action="store_true", help="every key as TOML, with default and meaning")
    what.add_argument("--config", metavar="FILE", type=Path, help="the settings of FILE with the environment applied")
    show.set_defaults(run=_show)

    check = actions.add_parser("check", help="say what is wrong with a file; exit code 2 if anything is")
    check.add_argument("--config", metavar="FILE", type=Path, required=True, help="configuration, .toml or .json")
    check.add_argument("--router-id", metavar="ID", help="overrides router.id of the configuration")
    check.set_defaults(run=_check)


def _show(args: argparse.Namespace) -> int:
    from narwhal.cli.settings import load_config
    from narwhal.config import Config

    if args.defaults:
        print("\n".join(_default_lines(Config)))
        return 0
    config = load_config(args.config, environ=os.environ)
    print("\n".join(_effective_lines(config.model_dump())))
    return 0


def _check(args: argparse.Namespace) -> int:
    from narwhal.cli.settings import load_config

    config = load_config(args.config, environ=os.environ, router_id=args.router_id)
    roles = [entry.role for entry in config.engines]
    print(
        f"{args.config}: ok (router {config.router.id}, cluster {config.ha.cluster},"
        f" {roles.count('prefill')} prefill and {roles.count('decode')} decode engines)"
    )
    return 0


def _effective_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        tables = [value] if isinstance(value, Mapping) else value
        for table in tables:
            yield f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"
            for key, item in table.items():
                yield f"#{key} is unset" if item is None else f"{key} = {toml_value(item)}"
            yield ""


def _default_lines(config: type[Section]) -> Iterator[str]:
    yield "# Every setting with its meaning and default. A key without default is commented out, with an example."
    yield "# NARWHAL_<SECTION>__<KEY> in the environment overrides one key. Secrets come from the environment only:"
    yield "# NARWHAL_REDIS_USERNAME, NARWHAL_REDIS_PASSWORD, NARWHAL_ADMIN_TOKEN."
    for name, field in config.model_fields.items():
        section, repeated = _section_of(field)
        yield ""
        yield f"# {_summary(section)}"
        if repeated:
            yield f"# A list, one block for each: {_meaning(name, field)}"
        yield f"#[[{name}]]" if repeated else f"[{name}]"
        for key, inner in section.model_fields.items():
            yield f"# {_meaning(key, inner)}"
            yield _key_line(key, inner)
        for index in range(1, _example_count(section) if repeated else 0):
            yield f"#[[{name}]]"
            yield from (f"#{key} = {_example(inner, index)}" for key, inner in section.model_fields.items())


def _section_of(field: FieldInfo) -> tuple[type[Section], bool]:
    """Return the section that a field of Config holds, and whether it holds a list of them."""
    from typing import get_args

    inner = get_args(field.annotation)
    section: Any = inner[0] if inner else field.annotation
    return section, bool(inner)


def _summary(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _key_line(key: str, field: FieldInfo) -> str:
    if field.is_required() or field.default is None:
        return f"#{key} = {_example(field, 0)}"
    return f"{key} = {toml_value(field.default)}"


def _example(field: FieldInfo, index: int) -> str:
    assert field.examples, "a key without default needs an example in config.py"
    return toml_value(field.examples[index])


def _example_count(section: type[Section]) -> int:
    """Return how many blocks of a list are shown: as many as every key has an example for."""
    return min(len(field.examples or ()) for field in section.model_fields.values())


def _meaning(key: str, field: FieldInfo) -> str:
    from typing import Literal, get_args, get_origin

    parts = [field.description or ""]
    parts += [unit for suffix, unit in (("_s", "seconds"), ("_bytes", "bytes")) if key.endswith(suffix)]
    if get_origin(field.annotation) is Literal:
        parts.append("one of " + ", ".join(map(toml_value, get_args(field.annotation))))
    parts += [text for item in _constraints(field) for text in _bound_words(item)]
    if field.is_required():
        parts.append("REQUIRED")
    return "; ".join(parts)


def _constraints(field: FieldInfo) -> list[Any]:
    """Return the bounds of a field, also those inside `X | None`."""
    from typing import get_args

    inner = [item for member in get_args(field.annotation) for item in getattr(member, "__metadata__", ())]
    return [*field.metadata, *(bound for item in inner for bound in getattr(item, "metadata", [item]))]


def _bound_words(constraint: Any) -> Iterator[str]:
    for attribute, words in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        bound = getattr(constraint, attribute, None)
        if bound is not None:
            yield f"{words} {bound}"


def toml_value(value: Any) -> str:
    """Return `value` (bool, number, string, or a list of them) as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(toml_value(item) for item in value) + "]"
