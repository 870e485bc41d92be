"""HTML pages about models: `inspect` shows a text token by token, `analyze` a run checkpoint by checkpoint, `results_page` the results
of `mnemos eval`, `audit_page` that of `mnemos audit`.

Each page is one HTML file that needs no network.
"""

from .analyze import Analysis, analyze, analyze_page
from .audit import audit_page
from .diagnostics import Finding, health
from .inspect import Inspection, inspect, inspect_page
from .results import results_page

__all__ = [
    "Analysis",
    "Finding",
    "Inspection",
    "analyze",
    "analyze_page",
    "audit_page",
    "health",
    "inspect",
    "inspect_page",
    "results_page",
]
