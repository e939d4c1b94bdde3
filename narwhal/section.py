"""What a section of the configuration is, and how every mistake in one is found and named.

Pydantic judges single settings; a model validator does not run when one of them is invalid. The rules between settings
are therefore kept apart, as a table of what they look at, and judged over whatever is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from narwhal.errors import ConfigError


class Rule(NamedTuple):
    """A condition between settings of one section. It is judged wherever all its `fields` are valid by themselves.

    `judge` gets their values in order and yields one `field: problem` for each mistake.
    """

    fields: tuple[str, ...]
    judge: Callable[..., Iterable[str]]


class RulesBroken(ValueError):
    """Settings that are valid one by one contradict each other."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys and loose types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def broken_rules(cls, known: Mapping[str, Any]) -> list[str]:
        """Return what contradicts in `known`, which may lack the settings that are invalid by themselves."""
        return [
            problem
            for rule in cls.rules
            if all(name in known for name in rule.fields)
            for problem in rule.judge(*(known[name] for name in rule.fields))
        ]

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if problems := self.broken_rules(self.model_dump()):
            raise RulesBroken("; ".join(problems))
        return self


SectionT = TypeVar("SectionT", bound=Section)


def parse_section(section: type[SectionT], data: Mapping[str, Any], *, source: str) -> SectionT:
    """Return the validated section.

    Raises ConfigError naming every mistake with its path: each setting that is invalid by itself, and each
    contradiction between settings that are valid by themselves. `source` names the file in the error.
    """
    raw = _tuples(data)
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        own = _own_mistakes([dict(item) for item in error.errors(include_url=False)])
        problems = [_describe(item) for item in own]
        problems += _broken_rules(section, raw, {item["loc"] for item in own})
        raise ConfigError(problems, source=source) from error


_DEPTH_MAX: Final = 16


def _tuples(value: Any, depth: int = 0) -> Any:
    """Turn lists into tuples, which strict validation asks for; TOML and JSON only know lists.

    No setting is nested deeper than the bound, so what lies below it is refused as it is.
    """
    if depth == _DEPTH_MAX:
        return value
    if isinstance(value, Mapping):
        return {key: _tuples(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item, depth + 1) for item in value)
    return value


def _own_mistakes(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep the settings that are invalid by themselves: a list whose entries are invalid is not also too short."""
    inside = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    return [
        item
        for item in items
        if not isinstance(item.get("ctx", {}).get("error"), RulesBroken)
        and not (item["type"] == "too_short" and item["loc"] in inside)
    ]


_Paths = set[tuple[int | str, ...]]


def _broken_rules(section: type[Section], raw: Any, bad: _Paths) -> list[str]:
    """Judge the rules of `section` and of the sections in it over what is valid by itself."""
    if () in bad:
        return []
    problems = section.broken_rules(_known(section, raw, bad))
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section) and name in raw:
            problems += [f"{name}.{problem}" for problem in _broken_rules(inner, raw[name], _below(name, bad))]
    return problems


def _below(name: int | str, paths: _Paths) -> _Paths:
    return {path[1:] for path in paths if path[0] == name}


def _known(section: type[Section], raw: Mapping[str, Any], bad: _Paths) -> dict[str, Any]:
    """Return the settings of a section that are valid by themselves, defaults included."""
    known: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if (name,) in bad or (name not in raw and field.is_required()):
            continue
        value = raw.get(name, field.default)
        known[name] = _known_entries(value, _below(name, bad)) if isinstance(value, tuple) else value
    return known


def _known_entries(entries: tuple[Any, ...], bad: _Paths) -> tuple[Any, ...]:
    """Return the entries of a list with as much as is valid in each; of an entry that is no table, nothing."""
    return tuple(
        {key: value for key, value in entry.items() if not {(index,), (index, key)} & bad}
        if isinstance(entry, Mapping)
        else {}
        if (index,) in bad
        else entry
        for index, entry in enumerate(entries)
    )


_PLAIN_WORDS: Final[dict[str, str]] = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "model_type": "must be a table",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "string_unicode": "must be Unicode text",
}


def _part(part: int | str) -> str:
    """Return a step of a path; a key that TOML would want quoted is quoted, so that a problem stays one line."""
    return str(part) if str(part).replace("_", "").replace("-", "").isalnum() else repr(part)


def _describe(item: Mapping[str, Any]) -> str:
    path = ".".join(map(_part, item["loc"])) or "(top level)"
    kind = item["type"]
    message = str(item["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    message = _PLAIN_WORDS.get(kind, message)
    if kind in ("extra_forbidden", "missing", "value_error"):
        return f"{path}: {message}"
    shown = repr(item["input"])
    return f"{path}: {message}, got {shown if len(shown) <= 60 else shown[:57] + '...'}"
