"""``evalkit`` with a fake runner: python drive.py MODULE:FUNCTION ARGUMENT..."""

import sys

from evalkit import cli
from evalkit.app import isolation

if __name__ == "__main__":
    isolation.PRELOAD = ("evalkit.methods.cosa",)
    isolation.RUNNER = sys.argv[1]
    sys.exit(cli.main(sys.argv[2:]))
