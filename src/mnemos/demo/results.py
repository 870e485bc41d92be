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

WITH_MEMORY, WINDOW_ONLY = "memory", "window only"
MODEL_NAMES = (WITH_MEMORY, WINDOW_ONLY)


@dataclass(frozen=True)
class DemoPlan:
    """Settings of the demo. seconds: training time of both models together; measuring is extra.

    distances: tokens between facts and questions, in `rows` rows of curriculum.pairs facts. far: the same for one long reading.
    conv_width: of the baseline's attention. Memories have such a convolution too; attention does not learn recall without one.
    """

    seconds: float = 170.0
    curriculum: Curriculum = field(default_factory=Curriculum)
    width: int = 64
    layers: int = 2
    heads: int = 2
    window: int = 16
    conv_width: int = 4
    text_characters: int = 3 * 2**20
    rows: int = 16
    distances: tuple[int, ...] = (2, 4, 16, 64, 256, 1024, 4096)  # at 2 all facts are inside the baseline's window
    far_rows: int = 2
    far: tuple[int, ...] = (1_000, 10_000, 100_000)
    attention_lengths: tuple[int, ...] = (1_000, 10_000)

    @property
    def reach(self) -> int:
        """Tokens that the sliding windows and convolutions of all layers of the baseline together reach back."""
        return self.layers * (self.window - 1 + max(0, self.conv_width - 1))

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
        """The same without the memory, whose convolution attention gets; wider feed-forward layers make up for its parameters."""
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "attention_window": self.window,
            "attention_conv_width": self.conv_width,
        }
        plain = presets.config("swa", "nano", **shape)
        missing = presets.count(self.memory_config()) - presets.count(plain)
        more = round(missing / (3 * self.width * self.layers))  # a hidden unit of a SwiGLU has three rows of weights
        return presets.config("swa", "nano", intermediate_size=plain.feedforward_size + more, **shape)

    def attention_config(self) -> MnemosConfig:
        """Full attention of the same shape; only the size of its cache is measured."""
        return presets.config(
            "transformer",
            "nano",
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
        )


@dataclass
class DemoReport:
    """Measurements of a run, by model if both were measured. `page` and `data` are the files it wrote."""

    plan: DemoPlan
    parameters: dict[str, int]
    curves: dict[str, Curve]
    recall: dict[str, list[Asked]]
    far: dict[str, list[Asked]]
    attention: dict[int, int]
    kept: Kept
    text: dict[str, float]
    seconds: float
    machine: str
    page: Path
    data: Path

    def to_json(self) -> dict[str, Any]:
        """All numbers; tensors are left out."""

        def asked(found: list[Asked]) -> list[dict[str, Any]]:
            return [
                {"distance": a.distance, "recall": a.recall, "state_bytes": a.state_bytes, "seconds": a.seconds}
                for a in found
            ]

        return {
            "plan": dataclasses.asdict(self.plan),
            "parameters": self.parameters,
            "training": {name: dataclasses.asdict(curve) for name, curve in self.curves.items()},
            "recall": {name: asked(found) for name, found in self.recall.items()},
            "far": {name: asked(found) for name, found in self.far.items()},
            "full_attention_bytes": self.attention,
            "saved": dataclasses.asdict(self.kept) | {"path": self.kept.path.name},
            "bits_per_byte": self.text,
            "seconds": self.seconds,
            "machine": self.machine,
        }


def example_at(plan: DemoPlan) -> int:
    """The distance at which examples are shown: the first beyond twice the reach of the windows."""
    return next((d for d in sorted(plan.distances) if d > 2 * plan.reach), max(plan.distances))


def examples_of(recall: dict[str, list[Asked]], distance: int, count: int = 5) -> list[tuple[str, str, str, str]]:
    """Person, thing, and the answer of each model."""
    memory, window = (next(a for a in recall[name] if a.distance == distance).examples(count) for name in MODEL_NAMES)
    return [(person, thing, said, other) for (person, thing, said), (_, _, other) in zip(memory, window)]
