"""``python -m autopar``: the command line."""

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
