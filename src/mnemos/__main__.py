"""`python -m mnemos`."""

import os
import sys

if __name__ == "__main__":
    if sys.path and sys.path[0] in ("", os.getcwd()) and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # -m has put the working folder there: a numpy.py in it is not ours to run
    from .cli import main

    sys.exit(main())
