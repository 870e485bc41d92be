"""Makes experiments/driver importable, here and in the worker processes that tests start."""

import sys
from pathlib import Path

# last on the path: tests/fuzz has a module `run` too
sys.path.append(str(Path(__file__).parents[2] / "experiments"))
