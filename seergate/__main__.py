"""``python -m seergate``: the same as the ``seergate`` command."""

import sys

from seergate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
