"""The driver of the experiments behind Mnemos' defaults and claims. Not in the wheel: run it as `python experiments/run.py`.

An `Experiment` is a folder: config.yaml holds what is trained and claimed, results.json the results. `run` runs the missing cells,
`tables` and `verdicts` evaluate them, `page` writes the pages.
"""

from .experiment import Experiment, find
from .runner import run
from .tables import pivot
from .verdicts import verdicts

__all__ = ["Experiment", "find", "pivot", "run", "verdicts"]
