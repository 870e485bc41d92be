"""Short trainings, many of them: one loop that trains a small model, and a pool of processes that keeps what is finished.

`mnemos ablate` and the experiments of the repository are made of these.
"""

from .pool import run_all
from .training import Course, train

__all__ = ["Course", "run_all", "train"]
