"""The kinds of models that a run may train, by config and by the type that a checkpoint records."""

from __future__ import annotations

from typing import Any

from .attached_source import AttachedSource
from .config import TrainConfig
from .model_source import ModelSource, PresetSource

KINDS: dict[str, type[ModelSource]] = {"mnemos": PresetSource, "mnemos_attached": AttachedSource}


def model_source(config: TrainConfig) -> ModelSource:
    """The source of the model of a run.

    >>> type(model_source(TrainConfig())).__name__
    'PresetSource'
    """
    return (PresetSource if config.base.model is None else AttachedSource)(config)


def saved_source(model: dict[str, Any]) -> type[ModelSource]:
    """The kind of a saved model, by the `model_type` of its config; raises a KeyError for an unknown one."""
    return KINDS[model.get("model_type", "mnemos")]
