"""``python -m moerl``: the command line; also how a launcher starts a rank."""

from __future__ import annotations

import sys

from moerl.cli import main

if __name__ == "__main__":
    sys.exit(main())
