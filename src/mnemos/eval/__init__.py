"""Evaluation: one file per suite, all over one adapter of a model (`lm`); a registry of suites; and `Evaluator`, which offers them all.

Texts are streamed through the model's state in pieces, so a longer text takes more time but not more memory.
`mnemos.eval.harness` is the adapter for lm-evaluation-harness (extra `eval`); it is imported only on use.
Names are imported lazily, because `mnemos eval --help` needs no torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .babilong import babilong_suite, public_babilong
    from .capacity import bare_capacity
    from .commonsense import commonsense_suite
    from .evaluator import AtlasEvaluator, Evaluator
    from .freeze_memory import frozen_memory
    from .length import context_length_scaling
    from .mad import MADDecoder, mad_score
    from .model_adapter import LanguageModel
    from .needle import needle_in_haystack_test, needle_suite
    from .pair_recall import capacity_suite, memory_capacity_test
    from .recall import accuracy, mqar_suite
    from .runner import run_suites
    from .settings import EvalSettings
    from .suites import SUITES, Context, Suite, register_suite
    from .text_loss import Perplexity, perplexity, perplexity_by_context
    from .vitality import vitality_suite

_HOME = {
    "SUITES": "suites",
    "AtlasEvaluator": "evaluator",
    "Context": "suites",
    "MADDecoder": "mad",
    "Evaluator": "evaluator",
    "LanguageModel": "model_adapter",
    "Perplexity": "text_loss",
    "EvalSettings": "settings",
    "Suite": "suites",
    "accuracy": "recall",
    "babilong_suite": "babilong",
    "bare_capacity": "capacity",
    "capacity_suite": "pair_recall",
    "commonsense_suite": "commonsense",
    "context_length_scaling": "length",
    "frozen_memory": "freeze_memory",
    "mad_score": "mad",
    "memory_capacity_test": "pair_recall",
    "mqar_suite": "recall",
    "needle_in_haystack_test": "needle",
    "needle_suite": "needle",
    "perplexity": "text_loss",
    "perplexity_by_context": "text_loss",
    "public_babilong": "babilong",
    "register_suite": "suites",
    "run_suites": "runner",
    "vitality_suite": "vitality",
}

__all__ = [
    "SUITES",
    "AtlasEvaluator",
    "Context",
    "EvalSettings",
    "Evaluator",
    "LanguageModel",
    "MADDecoder",
    "Perplexity",
    "Suite",
    "accuracy",
    "babilong_suite",
    "bare_capacity",
    "capacity_suite",
    "commonsense_suite",
    "context_length_scaling",
    "frozen_memory",
    "mad_score",
    "memory_capacity_test",
    "mqar_suite",
    "needle_in_haystack_test",
    "needle_suite",
    "perplexity",
    "perplexity_by_context",
    "public_babilong",
    "register_suite",
    "run_suites",
    "vitality_suite",
]


_RENAMED = {"Settings": "EvalSettings", "Decoder": "MADDecoder"}


def __getattr__(name: str):
    if name in _RENAMED:
        warnings.warn(f"{__name__}.{name} is called {_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value
