"""`python -m narwhal` is the command `narwhal`."""

from __future__ import annotations

import sys

from narwhal.cli import main

if __name__ == "__main__":
    sys.exit(main())
