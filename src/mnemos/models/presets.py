"""The models of the papers as entries of one table, and their sizes.

`names()` lists them, `config(name, size, **overrides)` returns the `MnemosConfig` of one, `count(config)` its number of parameters.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import torch

from ..choices import unknown
from ..deprecation import current_names, old_names
from ..memory import NeuralMemoryConfig
from ..memory.features import FEATURES
from ..memory.rules import RULES
from .config import FIELDS, MEMORY_FIELDS, OLD_KEYWORDS, MnemosConfig


@dataclass(frozen=True)
class Preset:
    """A row: the block of every layer and the choices of its memory, by the names of `NeuralMemoryConfig`."""

    name: str
    block: str
    about: str
    memory: dict[str, Any] | None = None
    model: dict[str, Any] | None = None

    @property
    def choices(self) -> dict[str, str]:
        """The row as the papers classify models: structure, objective, features, window, rule, retention."""
        if self.memory is None:
            return dict.fromkeys(("structure", "objective", "features", "window", "rule", "retention"), "-")
        memory: dict[str, Any] = {
            "structure": "mlp",
            "objective": "l2",
            "features": "identity",
            "window": 1,
            "rule": "gd",
        } | self.memory
        rule = memory["rule"] + (" + momentum" if memory.get("momentum", True) else "")
        return {
            "structure": memory["structure"],
            "objective": memory["objective"],
            "features": memory["features"],
            "window": str(memory["window"]),
            "rule": rule,
            "retention": {True: "per token", False: "none", "fixed": "fixed"}[memory.get("retain", True)],
        }

    @property
    def miras(self) -> dict[str, str]:
        """The four choices of Miras: memory, attentional bias (inner loss), retention, algorithm."""
        kinds = ("memory", "attentional bias", "retention", "algorithm")
        if self.memory is None:
            return dict.fromkeys(kinds, "-")
        choices: dict[str, Any] = {"heads": 1} | self.memory
        config = NeuralMemoryConfig(dim=64, **choices)
        spec, feature = config.spec, FEATURES[config.features]
        maps = len(spec.network.shapes())
        memory = "matrix" if maps == 1 else f"{spec.structure} of {maps} maps"
        lifted = "" if feature.is_identity else f", {spec.features} keys"
        window = f", window {spec.window}" if spec.window > 1 else ""
        kept = spec.retains.description if config.retain else "none"
        rule = RULES[spec.rule].description + (" + momentum" if config.momentum else "")
        anchor = ", at every token" if spec.anchor == "token" else f", chunks of {spec.chunk_size}"
        return dict(zip(kinds, (memory + lifted, spec.loss.description + window, kept, rule + anchor)))


@dataclass(frozen=True)
class Size:
    """Width, depth, heads, vocabulary and window. source: the papers and implementations with this size."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    source: str
    vocab_size: int = 32000
    window: int = 512


TITANS: dict[str, Any] = {}
OMEGA: dict[str, Any] = {
    "features": "monomials",
    "degree": 2,
    "key_dim": 10,  # 66 features
    "window": 16,
    "gate": "token",
    "momentum": False,
}
ATLAS: dict[str, Any] = OMEGA | {"rule": "muon", "commit_every": 1, "window": 4}
INTERVAL: dict[str, Any] = OMEGA | {"rule": "muon", "momentum": True, "chunk_size": 128}
TTT: dict[str, Any] = {"momentum": False, "retain": False, "chunk_size": 16, "w0_branch": False, "residual": True}
LINEAR: dict[str, Any] = {"structure": "linear", "momentum": False, "learn_w0": False}
KERNEL: dict[str, Any] = {"features": "exp", "momentum": False, "retain": False, "residual": True}
MIRAS: dict[str, Any] = {"momentum": False, "chunk_size": 16}
PERSISTENT = {"num_persistent_tokens": 4}
CONVOLUTION = {"attention_conv_width": 4}  # as memories have; without it attention does not learn recall

PRESETS = {
    row.name: row
    for row in (
        Preset("titans-lmm", "lmm", "Titans: deep memory, momentum, forgetting", TITANS, PERSISTENT),
        Preset("titans-mac", "mac", "Titans, memory as context", TITANS, PERSISTENT),
        Preset("titans-mag", "mag", "Titans, memory as gate", TITANS, PERSISTENT),
        Preset("titans-mal", "mal", "Titans, memory as layer", TITANS, PERSISTENT),
        Preset("omeganet", "lmm", "Omega rule: a window of tokens, polynomial features, gradient descent", OMEGA),
        Preset("atlas", "lmm", "Omega rule with Muon after every token", ATLAS),
        Preset("atlas++", "lmm", "Atlas with a gated memory network", ATLAS | {"structure": "gated_mlp"}),
        Preset("atlas-mac", "mac", "Atlas, memory as context", ATLAS),
        Preset("atlas-mag", "mag", "Atlas, memory as gate", ATLAS, PERSISTENT),
        Preset("atlas-mal", "mal", "Atlas, memory as layer", ATLAS, PERSISTENT),
        Preset(
            "atlas-interval",
            "lmm",
            "Atlas with momentum and a commit per chunk: cheaper, does not learn recall",
            INTERVAL,
        ),
        Preset("dla", "lmm", "deep linear attention: Hebbian deep memory", {"objective": "dot", "momentum": False}),
        Preset(
            "swla",
            "lmm",
            "sliding-window linear attention",
            LINEAR | {"objective": "dot", "window": 16, "gate": "token"},
        ),
        Preset(
            "deeptransformer",
            "lmm",
            "deep Hebbian memory over the kernel of softmax attention; grows",
            KERNEL | {"objective": "dot"},
        ),
        Preset(
            "swdt", "lmm", "DeepTransformer with a window", KERNEL | {"objective": "dot", "window": 16, "gate": "token"}
        ),
        Preset(
            "dot",
            "lmm",
            "Omega rule over the kernel of softmax attention; grows",
            KERNEL | {"window": 16, "gate": "token"},
        ),
        Preset(
            "qk-mag", "qk", "Q-K projection: queries seen through the keys so far, beside attention", None, PERSISTENT
        ),
        Preset(
            "linear-attention",
            "lmm",
            "Hebbian matrix memory, nothing forgotten",
            LINEAR | {"objective": "dot", "retain": False},
        ),
        Preset(
            "retnet",
            "lmm",
            "linear attention with a fixed decay per head",
            LINEAR | {"objective": "dot", "retain": "fixed"},
        ),
        Preset("deltanet", "lmm", "delta rule, token by token", LINEAR | {"anchor": "token", "retain": False}),
        Preset(
            "gated-deltanet", "lmm", "delta rule after forgetting", LINEAR | {"anchor": "token", "decay_first": True}
        ),
        Preset(
            "ttt-linear",
            "lmm",
            "test-time training of a matrix",
            TTT | {"structure": "linear"},
        ),
        Preset("ttt-mlp", "lmm", "test-time training of an MLP", TTT),
        Preset("yaad", "lmm", "Miras: a Huber loss with a threshold per token", MIRAS | {"objective": "huber_switch"}),
        Preset(
            "moneta",
            "lmm",
            "Miras: L3 loss, weights normalised by their 4-norm",
            MIRAS | {"objective": "lp(p=3)", "retention": "lq(q=4, floor=1)", "commit_every": 4},
        ),
        Preset(
            "memora",
            "lmm",
            "Miras: positive weights, forgetting by a KL divergence",
            MIRAS | {"retention": "kl(scale=2)", "commit_every": 4},
        ),
        Preset("transformer", "attention", "full attention with a convolution, no memory", None, CONVOLUTION),
        Preset("swa", "swa", "sliding-window attention with a convolution, no memory", None, CONVOLUTION),
    )
}
SIZES = {
    size.name: size
    for size in (
        Size("nano", 128, 4, 4, "minutes on a laptop's CPU", vocab_size=256, window=64),
        Size("micro", 256, 6, 4, "an hour on a laptop's CPU", vocab_size=256, window=128),
        Size("tiny", 384, 6, 6, "omega-tiny"),
        Size("mini", 512, 6, 8, "omega-small"),
        Size("small", 512, 8, 8, "atlas small, omega-medium"),
        Size("base", 768, 12, 12, "titans_small, atlas_small, omega-base"),
        Size("medium", 768, 12, 12, "atlas medium"),
        Size("large", 1024, 24, 16, "atlas large, titans_medium"),
        Size("xl", 1536, 24, 16, "titans_large"),
        # Small of Atlas-MAG_OmegaRule is another shape than small of atlas, hence the prefix; its counts include unused maps
        Size("omega-tiny", 384, 6, 6, "Atlas-MAG_OmegaRule Tiny, 33.7M there"),
        Size("omega-small", 512, 6, 8, "Atlas-MAG_OmegaRule Small, 54.4M there"),
        Size("omega-medium", 512, 8, 8, "Atlas-MAG_OmegaRule Medium, 67.0M there"),
        Size("omega-base", 768, 12, 12, "Atlas-MAG_OmegaRule Base, 195.1M there"),
        Size("170m", 768, 12, 16, "Titans, Atlas"),
        Size("340m", 1024, 24, 16, "Titans, Atlas"),
        Size("760m", 1536, 24, 16, "Titans, Atlas"),
        Size("1.3b", 2048, 18, 8, "Atlas"),
    )
}
OVERRIDES = sorted({*FIELDS, *(f"memory_{name}" for name in MEMORY_FIELDS)})


def names() -> list[str]:
    """Every preset, in the table's order.

    >>> "atlas-mag" in names()
    True
    """
    return list(PRESETS)


def config(name: str, size: str = "nano", **overrides) -> MnemosConfig:
    """The config of a preset in a size; any field of `MnemosConfig`, and of its memory as `memory_<name>`, can be overridden.

    >>> config("titans-mag", size="nano", vocab_size=1000, memory_depth=3).memory_config.depth
    3
    """
    preset, shape = _known("preset", name, PRESETS), _known("size", size, SIZES)
    unknown = sorted(set(overrides) - set(OVERRIDES) - set(OLD_KEYWORDS))
    if unknown:
        close = [match for field in unknown for match in difflib.get_close_matches(field, OVERRIDES, 3)]
        hint = f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(OVERRIDES)}"
        raise ValueError(f"a config has no field {', '.join(unknown)}{hint}")
    if not isinstance(overrides.get("memory") or {}, dict):
        raise ValueError(
            f"memory={overrides['memory']!r:.40} must hold names and values: memory={{depth: 3}}, or memory_depth=3"
        )
    memory = {} if preset.memory is None else {"heads": shape.heads} | preset.memory
    chosen = current_names("memory", overrides.pop("memory", None) or {}, old_names(NeuralMemoryConfig))
    fields: dict[str, Any] = {
        "layers": preset.block,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "attention_window": shape.window,
        "segment_length": shape.window,
        **(preset.model or {}),
        "memory": memory | chosen,
    }
    return MnemosConfig(**fields | overrides)


def size(name: str) -> Size:
    """A size by name.

    >>> size("340m").hidden_size
    1024
    """
    return _known("size", name, SIZES)


def count(config: MnemosConfig) -> int:
    """Parameters of a config's language model, tied ones once, without allocating any.

    >>> count(config("transformer", "nano")) < 1e6
    True
    """
    from .blocks import Block

    with torch.device("meta"):
        kinds = {kind: Block(config, kind) for kind in set(config.blocks)}
    each = {kind: sum(p.numel() for p in block.parameters()) for kind, block in kinds.items()}
    embeddings = config.vocab_size * (1 if config.tie_word_embeddings else 2)
    outside = (embeddings + config.num_persistent_tokens + 1) * config.hidden_size  # 1: the last norm
    return outside + sum(each[kind] for kind in config.blocks)


def _known(what: str, name: str, table: dict):
    if name not in table:
        raise unknown(what, name, table)
    return table[name]
