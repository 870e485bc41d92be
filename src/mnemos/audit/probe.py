"""`Probe`: what every check needs: the model in its own precision and in float64, texts, and comparisons.

Shapes: B batch rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.tasks import encode
from .extent import edges, sizes_of
from .registry import Outcome
from .settings import AuditSettings
from .subject import Subject
from .watch import Watch

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}  # transformers keeps parts of a float64 model in float32
COARSE = 0.1  # of bfloat16 and float16
AMPLIFIED, MOST = 10.0, 0.3  # times the rounding error of one call; a difference that is never rounding
LARGE = 20_000_000  # parameters, from which on fewer tokens and positions are tried
LENGTHS, POSITIONS = (512, 192), (48, 12)  # most of a small and of a large model
LEAST_LENGTH, UNKNOWN_LENGTHS = (
    64,
    (160, 96),
)  # of a model whose config names windows or chunks; of another one, small and large


class Probe:
    """A model under test. own: as it was given. wide: a copy in float64, on which rounding is measured; `own` if there is no such copy.

    sizes: the model's windows, segments and chunks, in tokens. length: tokens of a text. watch: follows the parts of
    checks. prompts: to be searched for leaked answers. outcomes: of earlier checks. blocked: checks left out because others failed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        settings: AuditSettings | None = None,
        watch: Watch | None = None,
        prompts: list[Any] | None = None,
    ):
        self.outcomes: dict[str, Outcome] = {}
        self.blocked: set[str] = set()
        self.prompts = prompts
        self.settings, self.tokenizer, self.watch = settings or AuditSettings(), tokenizer, watch or Watch()
        self.settings.check()
        self.own = Subject(model)
        self.wide = self._widened(model)
        self.size = sum(p.numel() for p in self.own.parameters())
        self.sizes = sorted({*sizes_of(self.own.config), *self.settings.boundaries})
        self.length = self._length()
        self._text = self._read_text()

    def status_of(self, check: str) -> str | None:
        """The status of an earlier check; None if it did not run."""
        return self.outcomes[check].status if check in self.outcomes else None

    def expect(self, parts: int) -> None:
        """Announce how many parts the check has at most."""
        self.watch.expect(parts)

    def tick(self) -> None:
        """Announce that a part of the check is done."""
        self.watch.part()

    @property
    def is_large(self) -> bool:
        return self.size > LARGE

    @property
    def is_wide(self) -> bool:
        """Whether there is a copy in float64."""
        return self.wide is not self.own

    def _widened(self, model: Any) -> Subject:
        if self.settings.dtype == "keep" or not isinstance(model, nn.Module):
            return self.own
        if all(p.dtype == torch.float64 for p in self.own.parameters()):
            return self.own
        try:
            changed = copy.deepcopy(model).double().eval()
            if hasattr(changed, "set_experts_implementation"):  # those of transformers compute in float32 at most
                with contextlib.suppress(ValueError):
                    changed.set_experts_implementation("eager")
            wide = Subject(changed)
            ids, mask = self.ids(1, 8), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
            found = [wide.logits(ids)] + ([wide.logits(ids, mask)[:, 4:]] if wide.has_mask else [])
        except Exception:  # a stranger's model may raise anything in a precision that it was not made for
            return self.own
        return wide if all(bool(torch.isfinite(x).all()) for x in found) else self.own

    def _length(self) -> int:
        usual = max(LEAST_LENGTH, 5 * max(self.sizes) // 2) if self.sizes else UNKNOWN_LENGTHS[self.is_large]
        found = self.settings.length or min(LENGTHS[self.is_large], usual)
        limit = self.own.max_length
        return found if limit is None else max(2, min(found, limit))

    def subjects(self) -> Iterator[tuple[Subject, float]]:
        """The model in float64 and as it is, each with the tolerance of its precision, relative to the scale of the logits."""
        for subject in dict.fromkeys((self.wide, self.own)):
            yield subject, self.tolerance(subject)

    def tolerance(self, subject: Subject) -> float:
        """That of the precision; below float64, ten times the error that rounding makes in one call, if that is more."""
        kinds = {p.dtype for p in subject.parameters() if p.dtype.is_floating_point} or {subject.dtype}
        known = max(TOLERANCES.get(kind, COARSE) for kind in kinds)
        return known if subject is self.wide else max(known, min(AMPLIFIED * self.rounding, MOST))

    @functools.cached_property
    def rounding(self) -> float:
        """The error of one call in the model's own precision: its difference from float64."""
        ids = self.ids(2)
        return difference(self.own.logits(ids).cpu(), self.wide.logits(ids).cpu())

    def ids(self, rows: int, length: int | None = None, seed: int = 0) -> Tensor:
        """Random tokens (B, T). The second half of a sequence repeats the first, so that there is something to recall."""
        length = self.length if length is None else length
        generator = torch.Generator().manual_seed(1_000_003 * self.settings.seed + 101 * seed + 7)
        special = self.own.special_ids if self.own.vocab_size > 16 else set()
        usable = torch.tensor([i for i in range(min(self.own.vocab_size, 50_000)) if i not in special])
        half = -(-length // 2)
        drawn = usable[torch.randint(len(usable), (rows, half), generator=generator)]
        return torch.cat([drawn, drawn], 1)[:, :length]

    def texts(self, seed: int = 0) -> Tensor:
        """Two sequences (2, T): pieces of `settings.text`, or random tokens without it. Each seed gives others."""
        if self._text is None:
            return self.ids(2, seed=seed)
        starts = [(2 * seed + row) * self.length % (len(self._text) - self.length + 1) for row in range(2)]
        return torch.stack([self._text[start : start + self.length] for start in starts])

    def _read_text(self) -> Tensor | None:
        """The tokens of `settings.text`; None without it. Raises a ValueError for a text that cannot be used."""
        if self.settings.text is None:
            return None
        if self.tokenizer is None:
            raise ValueError(f"text={self.settings.text!r:.200} needs a tokenizer, and the model has none")
        try:
            content = Path(self.settings.text).read_text(encoding="utf-8", errors="replace")
        except OSError as wrong:
            raise ValueError(f"text={self.settings.text!r:.200} cannot be read: {wrong.strerror}") from None
        found = torch.tensor(encode(self.tokenizer, content), dtype=torch.long)
        if len(found) < 2 * self.length:
            raise ValueError(
                f"text={self.settings.text!r:.200} has {len(found):,} tokens, but must have at least {2 * self.length:,}"
            )
        return found

    def other(self, ids: Tensor, seed: int = 1) -> Tensor:
        """Tokens of the same shape, each different from that of ids."""
        others = self.ids(ids.shape[0], ids.shape[1], seed=1000 + seed)
        step = torch.where(others == ids, 1, 0)
        return torch.where(others == ids, (ids + step) % self.own.vocab_size, others)

    def positions(self, most: int | None = None) -> list[int]:
        """Positions from 1 to T - 1: the edges of windows, segments and chunks first, others at random, in rising order."""
        wanted = self.settings.positions
        wanted = POSITIONS[self.is_large] if wanted is None else wanted or self.length - 1
        wanted = min(wanted, most or wanted)
        first = [t for t in edges(self.sizes, self.length) if 1 <= t < self.length]
        draw = random.Random(self.settings.seed)
        if len(first) > wanted:
            first = draw.sample(first, wanted)
        rest = [t for t in range(1, self.length) if t not in first]
        return sorted([*first, *draw.sample(rest, min(len(rest), wanted - len(first)))])

    def random_sizes(self, seed: int) -> list[int]:
        """Sizes of calls that add up to `length`: of one token, of several, and up to edges of windows and chunks."""
        draw, cuts = random.Random(f"{self.settings.seed}:{seed}"), set()
        inner = [t for t in edges(self.sizes, self.length) if 1 <= t < self.length]
        for _ in range(draw.randint(2, 4)):
            cut = draw.choice(inner) if inner and draw.random() < 0.5 else draw.randint(1, self.length - 1)
            cuts |= {cut, min(self.length - 1, cut + 1)} if draw.random() < 0.3 else {cut}
        places = [0, *sorted(cuts), self.length]
        return [b - a for a, b in zip(places, places[1:])]


def closest(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Of pairs (number, limit), the one that comes closest to its limit, or exceeds it most.

    >>> closest([(0.5, 10.0), (0.2, 1.0)])
    (0.2, 1.0)
    """
    return max(pairs, key=lambda pair: (pair[0] / pair[1], -pair[1]))


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest |found - expected| over the standard deviation of `expected`; infinite if one is not finite.

    >>> difference(torch.tensor([1.0, 3.5]), torch.tensor([1.0, 3.0]))
    0.5
    """
    found, expected = found.double(), expected.double()
    scale = expected.std(correction=0).clamp(min=1e-30)
    worst = ((found - expected).abs().max() / scale).item()
    return worst if worst == worst else float("inf")


def changes(found: Tensor, expected: Tensor) -> float:
    """The largest |found - expected|, exactly 0.0 if all are equal bit for bit; infinite if one is not finite."""
    if torch.equal(found, expected):
        return 0.0
    worst = (found.double() - expected.double()).abs().max().item()
    return worst if worst == worst else float("inf")
