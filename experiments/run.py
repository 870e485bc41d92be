"""Rerun the experiments behind the defaults and the claims of the documentation: `python experiments/run.py --help`."""

import sys

from driver.command import main

if __name__ == "__main__":
    sys.exit(main())
