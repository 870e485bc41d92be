"""`python -m mnemos`."""

import os
import sys

if __name__ == "__main__":
    if sys.path and sys.path[0] in ("", os.getcwd()) and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # -m puts the working folder first, and a numpy.py in it must not run
    from .cli import main

    sys.exit(main())
