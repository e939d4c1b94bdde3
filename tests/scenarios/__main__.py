"""`make golden`: write into every scenario file what the core answers now, for a review of the difference."""

from __future__ import annotations

import sys

from tests.scenarios.script import FILES, written_anew


def main() -> None:
    """Rewrite the files whose answers changed, and name them."""
    for file in FILES:
        before = file.read_text()
        after = written_anew(before)
        if after != before:
            file.write_text(after)
            sys.stdout.write(f"{file.name}: answers changed\n")


if __name__ == "__main__":
    main()
