"""What commands print: tables for people, one JSON document for machines, complaints on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.table import Table

EXIT_UNREACHABLE = 3
"""Redis, or the admin port that was needed, gave no answer."""


WIDEST: Final = 10_000


def print_json(document: Any) -> None:
    """Print `document` as one readable JSON document."""
    print(json.dumps(document, indent=1))


def print_table(table: Table) -> None:
    """Print `table`, coloured on a terminal, and never narrower than its content: nothing is cut off."""
    from rich.console import Console

    needed = Console(width=WIDEST).measure(table).maximum
    console = Console(highlight=False)
    Console(highlight=False, width=max(console.width, needed)).print(table)


def plain_table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """Return an empty table with `columns`, those in `right` set to the right, without lines between cells."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def complain(message: str) -> None:
    """Print `message` to standard error as the program's own."""
    print(f"narwhal: {message}", file=sys.stderr)


def seconds(value: float | None) -> str:
    """Return a duration for people: 0.4 s, 12 s, 3 min, 5 h; a dash for None."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.1f} s"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / divisor:.0f} {unit}"
    return f"{value / 86_400:.0f} d"
