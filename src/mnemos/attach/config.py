"""`AttachConfig`: the layers that get a memory, the window of attention, and the memory itself."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..choices import nearest, unknown
from ..memory import NeuralMemoryConfig
from ..memory.config import check_fields
from ..memory.spec import MAX_DIM
from ..models.presets import PRESETS

MAX_LAYERS = 2**12
ALIASES = {"titans": "titans-lmm"}


def memory_names() -> list[str]:
    """The names of memories: the presets without attention whose state has a constant size.

    >>> memory_names()[:3]
    ['titans', 'titans-lmm', 'omeganet']
    """
    rows = [row for row in PRESETS.values() if row.memory is not None and row.block == PRESETS["titans-lmm"].block]
    finite = [row for row in rows if not NeuralMemoryConfig(64, **row.memory).spec.is_kv_cache]  # ty: ignore[invalid-argument-type]
    return [*ALIASES, *(row.name for row in finite)]


@dataclass(frozen=True)
class AttachConfig:
    """How memories are attached to a pretrained model.

    layers: "every:5", one layer in five, the third of each five; or the indices of the layers, from 0.
    window: tokens that attention sees, the current one included, in every layer of the model; None: attention is unchanged.
    sinks: the first tokens of a sequence, which attention sees in addition to the window.
    memory: the name of a preset (`memory_names`), or a dict of fields of `NeuralMemoryConfig`; its key "preset" names the preset
    that the other fields change.
    source: the layer whose attention's input all memories read and write, at most the lowest of `layers`; None: each reads that of its
    own layer. Early layers keep the identity of tokens, which keys need; late layers are where an answer is added.
    target: the name of the attention module in each layer, for an architecture that `attach` does not list.

    >>> config = AttachConfig(layers="every:5", window=256, memory={"preset": "titans", "chunk_size": 32})
    >>> config.layer_indices(30), config.memory_config(576).chunk_size
    ((2, 7, 12, 17, 22, 27), 32)
    >>> AttachConfig.from_json(config.to_json()) == config
    True
    """

    layers: str | tuple[int, ...] | list[int] = "every:5"
    window: int | None = None
    sinks: int = 4
    memory: str | dict[str, Any] = "titans"
    target: str | None = None
    source: int | None = None

    def __post_init__(self):
        if isinstance(self.layers, list | range):
            object.__setattr__(self, "layers", tuple(self.layers))
        self._check_layers()
        if self.window is not None and (type(self.window) is not int or not 1 <= self.window <= MAX_DIM):
            raise ValueError(f"window={self.window!r:.60} must be None or a whole number in 1..{MAX_DIM}")
        if type(self.sinks) is not int or not 0 <= self.sinks <= MAX_DIM:
            raise ValueError(f"sinks={self.sinks!r:.60} must be a whole number in 0..{MAX_DIM}")
        if self.target is not None and (not isinstance(self.target, str) or not self.target.isidentifier()):
            raise ValueError(f"target={self.target!r:.60} must be the name of a module, such as 'self_attn', or None")
        if self.source is not None and (type(self.source) is not int or not 0 <= self.source < MAX_LAYERS):
            raise ValueError(f"source={self.source!r:.60} must be the index of a layer, or None")
        if not isinstance(self.memory, str | dict):
            raise ValueError(f"memory={self.memory!r:.60} must be the name of a preset or a dict of its fields")
        check_fields(self._memory_fields())

    def _check_layers(self) -> None:
        layers = self.layers
        if isinstance(layers, str):
            word, _, number = layers.partition(":")
            if word != "every" or not (number.isascii() and number.isdigit()) or not 1 <= int(number[:6]) <= MAX_LAYERS:
                raise ValueError(f"layers={layers!r:.60} must be 'every:N' or a list of layer indices")
        elif (
            not isinstance(layers, tuple)
            or not 0 < len(layers) <= MAX_LAYERS
            or any(type(i) is not int or not 0 <= i < MAX_LAYERS for i in layers)
            or len(set(layers)) < len(layers)
        ):
            raise ValueError(f"layers={layers!r:.60} must be 'every:N' or a list of different layer indices >= 0")

    def _memory_fields(self) -> dict[str, Any]:
        chosen = {"preset": self.memory} if isinstance(self.memory, str) else dict(self.memory)
        name = chosen.pop("preset", None)
        if "dim" in chosen:
            raise ValueError("memory has the field dim, which is always the width of the base model: leave it out")
        if name is None:
            return chosen
        if name not in memory_names():
            raise unknown("memory=", name, memory_names())
        return {**(PRESETS[ALIASES.get(name, name)].memory or {}), **chosen}

    def memory_config(self, dim: int) -> NeuralMemoryConfig:
        """The config of each memory beside layers of width `dim`. Raises a ValueError for a memory that grows with every token."""
        config = NeuralMemoryConfig(dim, **self._memory_fields())
        if config.spec.is_kv_cache:
            raise ValueError(
                f"memory has features={config.features!r:.40}, which grow with every token as attention does; "
                f"choose one of {', '.join(memory_names())}"
            )
        return config

    def layer_indices(self, depth: int) -> tuple[int, ...]:
        """The layers with a memory, of a model with `depth` layers."""
        found = self._layer_indices(depth)
        if self.source is not None and self.source > found[0]:
            raise ValueError(f"source={self.source} must not lie behind {found[0]}, the lowest layer with a memory")
        return found

    def _layer_indices(self, depth: int) -> tuple[int, ...]:
        if isinstance(self.layers, str):
            step = int(self.layers.partition(":")[2])
            found = tuple(range(step // 2, depth, step))
            if not found:
                raise ValueError(f"layers={self.layers!r} names none of the {depth} layers of the base model")
            return found
        if max(self.layers) >= depth:
            raise ValueError(
                f"layers={list(self.layers)!r:.60} must lie in 0..{depth - 1}, the layers of the base model"
            )
        return tuple(sorted(self.layers))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        found = dataclasses.asdict(self)
        return found | {"layers": self.layers if isinstance(self.layers, str) else list(self.layers)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, fields: Any) -> AttachConfig:
        """The config with these fields; raises a ValueError for a name that it does not have."""
        if not isinstance(fields, dict):
            raise ValueError(f"an AttachConfig is an object {{...}}, not {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                close = nearest(name, known)
                hint = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
                raise ValueError(f"AttachConfig has no field {name!r:.60}; {hint}")
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> AttachConfig:
        try:
            fields = json.loads(text)
        except (ValueError, TypeError, RecursionError) as broken:
            raise ValueError(f"an AttachConfig in JSON was expected, but the text is none: {broken}") from None
        return cls.from_dict(fields)
