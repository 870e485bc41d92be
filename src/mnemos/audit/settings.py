"""Options of an audit: flags of `mnemos audit`, and keywords of `mnemos.audit.run`."""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("auto", "constant", "linear")
DTYPES = ("auto", "keep")


@dataclass(frozen=True)
class AuditSettings:
    """Options of the checks. Each field is a flag of `mnemos audit`.

    >>> AuditSettings(length=1).check()
    Traceback (most recent call last):
    ValueError: length=1 must be at least 8
    """

    length: int | None = None
    """Tokens of the texts that are read; by default two of the model's largest window, segment or chunk and a half, at most 512 (192 for a large model)."""
    positions: int | None = None
    """Positions at which causality is tested, the edges of windows and chunks first; by default 48 (12 for a large model); 0 for all."""
    boundaries: tuple[int, ...] = ()
    """Sizes of windows, segments or chunks that the model's config does not name."""
    window: int | None = None
    """Tokens that attention reaches back through all layers, for the needle of a model whose config does not name it."""
    state: str = "auto"
    """The growth of the state that the model promises: constant, linear, or auto (as its cache declares)."""
    prompts: str | None = None
    """JSON lines of prompts to search for leaked answers: {"prompt", "answer"}, and optionally "needle", the part that may hold it."""
    text: str | None = None
    """File whose text the checks memory and gradients read instead of random tokens, for a memory that writes only certain texts."""
    samples: int = 24
    """Questions of each kind of the needle check; a large model gets only those that decide."""
    max_length: int | None = None
    """Longest prompt of the needle check, in tokens; by default 2048 (1024 for a large model whose layers together reach further than 2048)."""
    dtype: str = "auto"
    """Rounding is measured in float64 if the model can be converted (auto), or as the model is (keep)."""
    seed: int = 0
    """Seed of all texts."""

    def check(self) -> None:
        """Raise a ValueError for a value that is not possible."""
        for name, least in (("length", 8), ("positions", 0), ("window", 1), ("samples", 8), ("max_length", 16)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r:.40} must be at least {least}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed!r:.40} must be from 0 to 2**31 - 1")
        if any(type(size) is not int or size < 2 for size in self.boundaries):
            raise ValueError(f"boundaries={self.boundaries!r:.60} must be whole numbers of at least 2")
        for name, known in (("state", STATES), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r:.40} is unknown; choose one of {', '.join(known)}")
