"""Models of equal size: the width of the feed-forward layers that gives a model as many parameters as another one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from ..models import MnemosConfig, presets
from ..models.folder import read_object
from .config import ModelConfig, TrainConfig
from .runs import find_checkpoint

SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def match_size(config: ModelConfig, target: str, vocab_size: int) -> tuple[ModelConfig, int]:
    """The model's choices with `intermediate_size` set so that it has as many parameters as `target`, and their number.

    target: a preset (`titans-mag`, in the size of `config`, or `titans-mag:tiny`), a number of parameters (`10M`), a run, or a folder
    with a model of ours. vocab_size: of both models, unless a run or a folder has its own. The sizes differ by at most half a hidden
    unit in every layer.

    >>> matched, wanted = match_size(ModelConfig("transformer"), "titans-mag", vocab_size=256)
    >>> found = presets.count(presets.config("transformer", "nano", vocab_size=256, **matched.overrides()))
    >>> abs(found - wanted) / wanted < 0.002
    True
    """
    given = config.overrides()
    if given.get("intermediate_size") is not None:
        raise ValueError("--match-size chooses intermediate_size: leave it out of --model.set")
    given = {"vocab_size": vocab_size} | given
    wanted = parameters_of(target, config.size, given)

    def count(width: int) -> int:
        return presets.count(presets.config(config.preset, config.size, **given | {"intermediate_size": width}))

    least, unit = count(1), count(2) - count(1)
    width = 1 + round((wanted - least) / unit)
    if width < 1:
        raise ValueError(
            f"--match-size {target}: {config.preset} {config.size} has at least {least:,} parameters, more than {wanted:,}; "
            "choose fewer layers or a smaller hidden_size by --model.set"
        )
    return dataclasses.replace(config, set=(*config.set, f"intermediate_size={width}")), wanted


def parameters_of(target: str, size: str, given: dict[str, Any]) -> int:
    """Parameters of a target of `match_size`. given: fields of the config; a preset gets those of its shape.

    >>> parameters_of("2.5M", "nano", {})
    2500000
    """
    number = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kmb]?)", target.lower())
    if number:
        return round(float(number[1]) * UNITS[number[2]])
    name, _, other = target.partition(":")
    if name in presets.PRESETS:
        shape = {field: given[field] for field in SHARED if field in given and not (other and field != "vocab_size")}
        return presets.count(presets.config(name, other or size, **shape))
    folder = Path(target)
    if (folder / "config.yaml").is_file():
        return _parameters_of_run(folder)
    if (folder / "config.json").is_file():
        return presets.count(_config_of(read_object(folder / "config.json"), target))
    raise ValueError(
        f"--match-size {target:.200}: this is no preset of `mnemos presets`, no run, no folder of a model, and no number such as 10M"
    )


def _parameters_of_run(run: Path) -> int:
    try:
        model = read_object(find_checkpoint(run, "last") / "state.json").get("model")
    except ValueError:  # no checkpoint yet: by its settings, if they name the vocabulary
        chosen = TrainConfig.load(run / "config.yaml").model
        fields = chosen.overrides()
        if "vocab_size" not in fields:
            raise ValueError(
                f"--match-size {run}: the run has no checkpoint yet, so its vocabulary is unknown"
            ) from None
        return presets.count(presets.config(chosen.preset, chosen.size, **fields))
    return presets.count(_config_of(model, str(run)))


def _config_of(found: Any, name: str) -> MnemosConfig:
    if not isinstance(found, dict) or found.get("model_type", "mnemos") != "mnemos":
        raise ValueError(f"--match-size {name}: the folder holds no model of ours")
    return MnemosConfig.from_dict(found)
