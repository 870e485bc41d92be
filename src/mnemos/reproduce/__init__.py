"""The experiments that Mnemos' defaults and claims rest on: read from `experiments/`, rerun, compared with what was kept.

`Experiment` is a folder: config.yaml says what is trained and what is claimed, results.json what came out. `run` does what is missing,
`tables` and `verdicts` draw conclusions, `page` writes them down.
"""

from .experiment import Experiment, find
from .runner import run
from .tables import pivot
from .verdicts import verdicts

__all__ = ["Experiment", "find", "pivot", "run", "verdicts"]
