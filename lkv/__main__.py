"""``python -m lkv``."""

from __future__ import annotations

import sys

from lkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
