"""The plan of a demo, and the report of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..models import MnemosConfig, presets
from .facts import VOCABULARY
from .measure import Asked, Kept
from .training import Curriculum, Curve

WITH_MEMORY, WINDOW_ONLY, FULL_ATTENTION = "memory", "window only", "full attention"
MODEL_NAMES = (WITH_MEMORY, WINDOW_ONLY, FULL_ATTENTION)


@dataclass(frozen=True)
class DemoPlan:
    """Settings of the demo. window: of the memory model's attention; baseline_window: of the model that has nothing else.

    distances: tokens between facts and questions, in `rows` sequences of curriculum.pairs facts. attention_distances: those at which full
    attention is asked; beyond, its time and its cache grow out of a demo. conv_width: of the baselines' attention. Memories have such a
    convolution too; attention does not learn recall without one. seconds: an upper limit of each training; None for none.
    """

    curriculum: Curriculum = field(default_factory=Curriculum)
    width: int = 64
    layers: int = 2
    heads: int = 2
    window: int = 16
    baseline_window: int = 64
    conv_width: int = 4
    text_characters: int = 3 * 2**20
    rows: int = 16
    distances: tuple[int, ...] = (2, 16, 64, 256, 1_024, 4_096, 10_000, 30_000, 100_000)
    attention_distances: tuple[int, ...] = (2, 16, 64, 256, 1_024, 4_096, 10_000)
    seconds: float | None = None

    @property
    def reach(self) -> int:
        """Tokens that the sliding windows and convolutions of all layers of the baseline together reach back."""
        return self.layers * (self.baseline_window - 1 + max(0, self.conv_width - 1))

    @property
    def questions(self) -> int:
        """Questions at each distance."""
        return self.rows * self.curriculum.pairs

    def config(self, name: str) -> MnemosConfig:
        """The config of one of the three models."""
        makers = {
            WITH_MEMORY: self.memory_config,
            WINDOW_ONLY: self.window_config,
            FULL_ATTENTION: self.attention_config,
        }
        return makers[name]()

    def distances_of(self, name: str) -> tuple[int, ...]:
        """The distances at which a model is asked."""
        return self.attention_distances if name == FULL_ATTENTION else self.distances

    def memory_config(self) -> MnemosConfig:
        """Sliding-window attention and a matrix memory under the delta rule, in parallel in every layer. The memory does not decay: a fact is
        lost only if later writes overwrite it."""
        return presets.config(
            "deltanet",
            "nano",
            layers="mag",
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            attention_window=self.window,
            memory_heads=self.heads,
            memory_chunk_size=32,
        )

    def window_config(self) -> MnemosConfig:
        """Sliding-window attention alone, with a window four times as long and as many parameters."""
        return self._matched("swa", attention_window=self.baseline_window)

    def attention_config(self) -> MnemosConfig:
        """Full attention, with as many parameters. Slow rotations carry its recall to all distances of the training; the usual ones do not."""
        return self._matched("transformer", rope_theta=1e6)

    def _matched(self, preset: str, **choices: float) -> MnemosConfig:
        """A model without memory, whose feed-forward layers are wider by the parameters of the memories."""
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "attention_conv_width": self.conv_width,
        } | choices
        plain = presets.config(preset, "nano", **shape)
        missing = presets.count(self.memory_config()) - presets.count(plain)
        more = round(missing / (3 * self.width * self.layers))  # a hidden unit of a SwiGLU has three rows of weights
        return presets.config(preset, "nano", intermediate_size=plain.feedforward_size + more, **shape)


@dataclass
class DemoReport:
    """Measurements of a run, by model. `page` and `data` are the files it wrote."""

    plan: DemoPlan
    parameters: dict[str, int]
    curves: dict[str, Curve]
    recall: dict[str, list[Asked]]
    kept: Kept
    text: dict[str, float]
    seconds: float
    machine: str
    page: Path
    data: Path

    def to_json(self) -> dict[str, Any]:
        """All numbers; tensors and texts are left out."""
        names = ("distance", "recall", "state_bytes", "seconds")
        return {
            "plan": dataclasses.asdict(self.plan),
            "questions": self.plan.questions,
            "parameters": self.parameters,
            "training": {name: dataclasses.asdict(curve) for name, curve in self.curves.items()},
            "recall": {
                model: [{name: getattr(asked, name) for name in names} for asked in found]
                for model, found in self.recall.items()
            },
            "saved": dataclasses.asdict(self.kept) | {"path": self.kept.path.name},
            "bits_per_byte": self.text,
            "seconds": self.seconds,
            "machine": self.machine,
        }


@dataclass(frozen=True)
class Example:
    """One reader: the facts, the text that followed (its beginning and its end), and each model's answer to each question."""

    distance: int
    facts: list[tuple[str, str]]
    text: str
    answers: dict[str, list[str]]


def example_of(report_recall: dict[str, list[Asked]], distance: int) -> Example:
    """The first reader at a distance. Models that were not asked at it are left out."""
    asked = {name: next((a for a in found if a.distance == distance), None) for name, found in report_recall.items()}
    known = {name: a for name, a in asked.items() if a is not None}
    first = known[WITH_MEMORY]
    facts = [(person, thing) for person, thing, _ in first.examples()]
    return Example(
        distance, facts, first.text, {name: [said for *_, said in a.examples()] for name, a in known.items()}
    )


def example_at(plan: DemoPlan) -> int:
    """The distance at which examples are shown: the first beyond four times the reach of the windows."""
    return next((d for d in sorted(plan.distances) if d > 4 * plan.reach), max(plan.distances))
