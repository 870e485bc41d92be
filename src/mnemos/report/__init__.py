"""Pages that show what a memory did: `inspect` reads a text token by token, `analyze` a run checkpoint by checkpoint;
`results_page` has what `mnemos eval` found.

Each page is one HTML file that needs no network.
"""

from .analyze import Analysis, analyze, analyze_page
from .diagnostics import Finding, health
from .inspect import Inspection, inspect, inspect_page
from .results import results_page

__all__ = [
    "Analysis",
    "Finding",
    "Inspection",
    "analyze",
    "analyze_page",
    "health",
    "inspect",
    "inspect_page",
    "results_page",
]
