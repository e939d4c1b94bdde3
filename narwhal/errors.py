"""The exceptions that cross module borders. A leaf: it imports nothing of ours.

Expected refusals are values (`NotReady`, `Refused`), never exceptions. What engines do wrong is in `core/faults.py`,
since each of those carries its failure class.
"""

from __future__ import annotations

from collections.abc import Sequence


class NarwhalError(Exception):
    """Anything that Narwhal raises on purpose."""


class ConfigError(NarwhalError):
    """The configuration cannot be used; `problems` names every mistake with its path."""

    def __init__(self, problems: Sequence[str], *, source: str = "configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(f"{source}: " + "; ".join(self.problems))


class StoreUnavailable(NarwhalError):
    """The store gave no usable answer; whether the operation took place is unknown."""


class StoreMisused(NarwhalError):
    """The store answered that it will never do this: wrong password, no permission, not Redis at all."""


class StateInUse(NarwhalError):
    """Another process already runs as this router."""


class HandoffRefused(NarwhalError):
    """A handoff write was refused because a newer fencing token or version is recorded."""


class HandoffRejected(NarwhalError):
    """A handoff document was read but cannot be applied; `reasons` names each mismatch."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("handoff rejected: " + "; ".join(self.reasons))
