"""What a stub engine can be told to do wrong: a closed list of faults, and how each is written down.

A fault is written `[LEG:]KIND[=VALUE][,KEY=VALUE...]`, e.g. `decode:status=503,retry_after_s=2,times=3`, or as a JSON
object with the same keys: `{"leg": "decode", "kind": "status", "status": 503, "times": 3}`.

Every fault takes `times` (it heals after firing so often), `every` (it fires on each k-th matching request) and `skip`
(it lets that many pass first). The rest of the keys is in `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final, NamedTuple

from narwhal.errors import NarwhalError


class FaultSpecError(NarwhalError, ValueError):
    """A fault was written in a way that means nothing; the message says which part and what would be understood."""


class FaultLeg(StrEnum):
    """Which requests a fault meets. `info` is everything beside generation and /health: models, metrics, version."""

    PREFILL = "prefill"
    DECODE = "decode"
    HEALTH = "health"
    INFO = "info"
    ANY = "any"


class FaultKind(StrEnum):
    """What goes wrong."""

    REFUSE = "refuse"
    HANG = "hang"
    RESET = "reset"
    STATUS = "status"
    DELAY = "delay"
    PAUSED = "paused"
    RESTART = "restart"
    OTHER_MODEL = "other_model"
    BAD_TICKET = "bad_ticket"
    STALE_TICKET = "stale_ticket"
    NO_FIRST_TOKEN = "no_first_token"  # noqa: S105 - a token of text
    SILENCE = "silence"
    CUT = "cut"
    NO_FINISH = "no_finish"
    ERROR_FRAME = "error_frame"
    BAD_200 = "bad_200"
    SLOW = "slow"
    SPLIT = "split"
    BIG_FRAME = "big_frame"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. Fields that its kind does not use keep their defaults."""

    kind: FaultKind
    leg: FaultLeg = FaultLeg.ANY
    times: int | None = None
    every: int = 1
    skip: int = 0
    status: int = 500
    retry_after_s: float | None = None
    body: str | None = None
    delay_ms: float = 0.0
    after: int = 0
    keepalive_ms: float | None = None
    done: bool = True
    itl_ms: float = 0.0
    variant: str = ""
    model: str = ""
    size_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the fault as JSON that `parse_fault` reads back."""
        used = {"kind", "leg", "times", "every", "skip", *KINDS[self.kind].keys}
        return {name: value for name, value in asdict(self).items() if name in used and value is not None}


GENERATION: Final = frozenset({FaultLeg.PREFILL, FaultLeg.DECODE, FaultLeg.ANY})
EVERYWHERE: Final = frozenset(FaultLeg)
PREFILL_ONLY: Final = frozenset({FaultLeg.PREFILL, FaultLeg.ANY})
ENGINE_WIDE: Final = frozenset({FaultLeg.ANY})

TICKET_VARIANTS: Final = ("null", "absent", "missing_key", "empty_blocks", "empty_group", "not_a_dict")
BODY_VARIANTS: Final = ("error", "null_choices", "not_json", "empty")
REFUSE_VARIANTS: Final = ("closed", "rst")


class KindSpec(NamedTuple):
    """How one kind is written: the key that `KIND=VALUE` sets, the other keys, where it may happen, its variants."""

    value: str | None = None
    keys: frozenset[str] = frozenset()
    legs: frozenset[FaultLeg] = GENERATION
    variants: tuple[str, ...] = ()
    required: bool = False


def _kind(value: str | None = None, *more: str, **rest: Any) -> KindSpec:
    return KindSpec(value=value, keys=frozenset(more) | ({value} if value else set()), **rest)


KINDS: Final[dict[FaultKind, KindSpec]] = {
    # New connections are refused (the listener is closed), or accepted and reset at once (`rst`, which can count).
    FaultKind.REFUSE: _kind("variant", legs=ENGINE_WIDE, variants=REFUSE_VARIANTS),
    # The request is read and never answered; when the fault is lifted it is answered after all.
    FaultKind.HANG: _kind(legs=EVERYWHERE),
    # The request is read and the connection reset.
    FaultKind.RESET: _kind(legs=EVERYWHERE),
    FaultKind.STATUS: _kind("status", "retry_after_s", "body", legs=EVERYWHERE, required=True),
    FaultKind.DELAY: _kind("delay_ms", legs=EVERYWHERE, required=True),
    # New requests wait and running streams freeze until lifted, as after POST /pause?mode=keep.
    FaultKind.PAUSED: _kind(legs=ENGINE_WIDE),
    # The process dies with the request that fires it: all connections are lost, a new generation answers the next.
    FaultKind.RESTART: _kind(legs=EVERYWHERE),
    FaultKind.OTHER_MODEL: _kind("model", legs=ENGINE_WIDE, required=True),
    FaultKind.BAD_TICKET: _kind("variant", legs=PREFILL_ONLY, variants=TICKET_VARIANTS),
    # The ticket names an engine id that this process does not have, as one of the process before would.
    FaultKind.STALE_TICKET: _kind(legs=PREFILL_ONLY),
    # Headers (and the role frame of chat), then nothing, or comments for ever.
    FaultKind.NO_FIRST_TOKEN: _kind("keepalive_ms"),
    FaultKind.SILENCE: _kind("after"),
    # The connection ends after so many tokens without the terminal chunk.
    FaultKind.CUT: _kind("after"),
    # All tokens, but no finish reason; `done=false` leaves out the terminal marker too.
    FaultKind.NO_FINISH: _kind("done"),
    # An error frame after so many tokens, then [DONE]: how vLLM ends a stream that failed.
    FaultKind.ERROR_FRAME: _kind("after"),
    FaultKind.BAD_200: _kind("variant", variants=BODY_VARIANTS),
    FaultKind.SLOW: _kind("itl_ms", required=True),
    # Every frame in several writes, cut inside "data:" and inside each character of several bytes.
    FaultKind.SPLIT: _kind(),
    # The frame of the first token is one line of this many bytes.
    FaultKind.BIG_FRAME: _kind("size_bytes"),
}
assert KINDS.keys() == set(FaultKind), "a new kind needs a row that says how it is written"

_DEFAULTS: Final[dict[FaultKind, dict[str, Any]]] = {
    FaultKind.REFUSE: {"variant": "closed"},
    FaultKind.BAD_TICKET: {"variant": "null"},
    FaultKind.BAD_200: {"variant": "error"},
    FaultKind.BIG_FRAME: {"size_bytes": 3_000_000},
    FaultKind.RESTART: {"times": 1},
}
_COMMON: Final = frozenset({"times", "every", "skip"})


def parse_fault(text: str) -> Fault:
    """Return the fault written as `[LEG:]KIND[=VALUE][,KEY=VALUE...]`; `body=` takes the rest of the text.

    Raises FaultSpecError.
    """
    head, _, tail = text.strip().partition(",")
    leg, colon, kind = head.partition(":")
    if not colon or "=" in leg:
        leg, kind = FaultLeg.ANY.value, head
    kind, equals, value = kind.partition("=")
    written: dict[str, Any] = {"leg": leg.strip(), "kind": kind.strip()}
    if equals:
        key = KINDS[_kind_named(kind.strip(), text)].value
        if key is None:
            raise FaultSpecError(f"fault {text!r}: {kind.strip()!r} takes no value")
        written[key] = value.strip()
    while tail:
        pair, _, rest = (tail, "", "") if tail.lstrip().startswith("body=") else tail.partition(",")
        key, equals, value = pair.partition("=")
        if not equals or key.strip() in written:
            raise FaultSpecError(f"fault {text!r}: {pair.strip()!r} must be KEY=VALUE, each key once")
        written[key.strip()] = value.strip()
        tail = rest
    return _build(written, repr(text))


def fault_from_json(document: object) -> Fault:
    """Return the fault in a JSON object, or in a string as `parse_fault` reads it. Raises FaultSpecError."""
    if isinstance(document, str):
        return parse_fault(document)
    if not isinstance(document, Mapping):
        raise FaultSpecError(f"a fault is an object or a string, not {document!r}")
    return _build(document, str(dict(document)))


def _kind_named(name: object, where: str) -> FaultKind:
    try:
        return FaultKind(str(name))
    except ValueError:
        raise FaultSpecError(f"fault {where}: unknown kind {name!r}; there are {', '.join(FaultKind)}") from None


def _build(written: Mapping[str, Any], where: str) -> Fault:
    if "kind" not in written:
        raise FaultSpecError(f"fault {where}: 'kind' is required; there are {', '.join(FaultKind)}")
    kind = _kind_named(written["kind"], where)
    spec = KINDS[kind]
    leg = str(written.get("leg", FaultLeg.ANY))
    if leg not in spec.legs:
        raise FaultSpecError(f"fault {where}: {kind} has no leg {leg!r}, only {', '.join(sorted(spec.legs))}")
    values: dict[str, Any] = dict(_DEFAULTS.get(kind, {}))
    for key, value in written.items():
        if key in ("kind", "leg"):
            continue
        if key not in spec.keys | _COMMON:
            raise FaultSpecError(f"fault {where}: {kind} has no {key!r}, only {', '.join(sorted(spec.keys | _COMMON))}")
        values[key] = _typed(key, value, where)
    _check(kind, spec, values, where)
    return Fault(kind=kind, leg=FaultLeg(leg), **values)


def _check(kind: FaultKind, spec: KindSpec, values: Mapping[str, Any], where: str) -> None:
    if spec.required and spec.value not in values:
        raise FaultSpecError(f"fault {where}: {kind} needs a value: {kind}=... sets {spec.value}")
    if spec.variants and values["variant"] not in spec.variants:
        raise FaultSpecError(
            f"fault {where}: {kind} has no variant {values['variant']!r}, only {', '.join(spec.variants)}"
        )
    counted = values.get("times") is not None or values.get("every", 1) != 1 or values.get("skip", 0) != 0
    if counted and spec.legs is ENGINE_WIDE and values.get("variant") != "rst":
        raise FaultSpecError(f"fault {where}: {kind} holds until it is lifted, it cannot count; only refuse=rst can")


def _whole(least: int, most: int | None = None) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        number = int(value) if isinstance(value, str) else value
        if type(number) is not int or number < least or (most is not None and number > most):
            raise ValueError
        return number

    return convert


def _amount(value: Any) -> float:
    number = float(value) if isinstance(value, str) else value
    if type(number) not in (int, float) or not math.isfinite(number) or number < 0:
        raise ValueError
    return float(number)


def _truth(value: Any) -> bool:
    if value in (True, "true"):
        return True
    if value in (False, "false"):
        return False
    raise ValueError


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


_TYPES: Final[dict[str, tuple[Callable[[Any], Any], str]]] = {
    "times": (_whole(1), "a whole number, at least 1"),
    "every": (_whole(1), "a whole number, at least 1"),
    "skip": (_whole(0), "a whole number, at least 0"),
    "status": (_whole(200, 599), "a status code, 200 to 599"),
    "retry_after_s": (_amount, "seconds, at least 0"),
    "body": (_text, "text"),
    "delay_ms": (_amount, "milliseconds, at least 0"),
    "after": (_whole(0), "a count of tokens, at least 0"),
    "keepalive_ms": (_amount, "milliseconds, at least 0"),
    "done": (_truth, "true or false"),
    "itl_ms": (_amount, "milliseconds, at least 0"),
    "variant": (_text, "a word"),
    "model": (_text, "a model name"),
    "size_bytes": (_whole(1, 1 << 30), "a count of bytes, 1 to 2^30"),
}
assert _TYPES.keys() == {field.name for field in fields(Fault)} - {"kind", "leg"}, "each key needs a type"


def _typed(key: str, value: Any, where: str) -> Any:
    convert, words = _TYPES[key]
    try:
        return convert(value)
    except (ValueError, OverflowError):
        raise FaultSpecError(f"fault {where}: {key} must be {words}, not {value!r}") from None
