"""How commands end: exit codes, and expected failures as lines on standard error instead of tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from narwhal.errors import ConfigError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISUSED = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


def guarded(run: Callable[[], int]) -> int:
    """Return the exit code of `run`; a ConfigError is printed with one line for each problem and becomes 2."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(describe(error), file=sys.stderr)
        return EXIT_MISUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED


def describe(error: ConfigError) -> str:
    """Return the message for people: what cannot be used, then one problem a line."""
    count = len(error.problems)
    head = f"narwhal: {error.source} cannot be used, {count} problem{'s' if count != 1 else ''}:"
    return "\n".join([head, *(f"  {problem}" for problem in error.problems)])
