"""Evaluation: one file per suite over one view of a model (`lm`), the suites by name, and `Evaluator`, which offers all of them.

Everything streams: a text is read through the model's state in pieces, so length costs time and no memory.
`mnemos.eval.harness` is the adapter for lm-evaluation-harness (extra `eval`); it is imported only where it is used.
"""

from .babilong import babilong_suite, public_babilong
from .capacity import bare_capacity
from .commonsense import commonsense_suite
from .evaluator import AtlasEvaluator, Evaluator
from .frozen import frozen_memory
from .length import context_length_scaling
from .lm import LanguageModel
from .mad import Decoder, mad_score
from .needle import needle_in_haystack_test, needle_suite
from .pairs import capacity_suite, memory_capacity_test
from .perplexity import Perplexity, perplexity, perplexity_by_context
from .recall import accuracy, mqar_suite
from .runner import run_suites
from .suites import SUITES, Settings

__all__ = [
    "SUITES",
    "AtlasEvaluator",
    "Decoder",
    "Evaluator",
    "LanguageModel",
    "Perplexity",
    "Settings",
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
    "run_suites",
]
