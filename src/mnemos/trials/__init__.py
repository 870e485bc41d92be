"""Many short trainings: `train` trains one small model, `run_all` runs many in a pool of processes.

Used by `mnemos ablate` and by the experiments of the repository.
"""

from .pool import run_all
from .training import TrialConfig, train

__all__ = ["TrialConfig", "run_all", "train"]
