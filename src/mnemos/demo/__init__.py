"""A five-minute demonstration of memory: `mnemos demo`, `make demo`.

`run` trains a small memory model and a sliding-window Transformer of its size, measures both, and writes one report page.
"""

from .run import DemoPlan, DemoReport, run

__all__ = ["DemoPlan", "DemoReport", "run"]
