"""Which of a preset's choices does a task need? Each is switched off in turn, trained with several seeds, and put into a table.

`ABLATIONS` says what is switched off and how, `Settings` what is trained, `run` does it in parallel processes, `summary` draws conclusions.
"""

from ..trials.intervals import student_t
from .grid import ABLATIONS, Ablation, applicable
from .runner import Settings, run
from .summary import summary
from .tasks import TASKS

__all__ = ["ABLATIONS", "TASKS", "Ablation", "Settings", "applicable", "run", "student_t", "summary"]
