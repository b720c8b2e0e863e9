"""``python -m evalkit.lmeval``: the same as the console command ``evalkit-lm-eval``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
