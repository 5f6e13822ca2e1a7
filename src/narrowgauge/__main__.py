"""``python -m narrowgauge``: the same as the console script, for places where nothing can be installed."""

import sys

from narrowgauge.cli import main

if __name__ == "__main__":
    sys.exit(main())
