"""`Evaluator`: all evaluations of one model, in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..data.tasks import Background
from ..data.tasks.babilong import mentions_names
from .babilong import babilong_suite
from .commonsense import commonsense_suite
from .commonsense_data import SOURCES
from .length import CONTEXT_LENGTHS, context_length_scaling
from .mad import mad_score
from .model_adapter import LanguageModel
from .needle import needle_in_haystack_test, needle_suite
from .pair_recall import memory_capacity_test
from .recall import mqar_suite
from .runner import run_suites
from .settings import EvalSettings
from .suites import usual_suites
from .text_loss import Perplexity, perplexity, perplexity_by_context
from .vitality import vitality_suite


class Evaluator:
    """A model and its tokenizer (default: bytes), with a method for each evaluation.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> evaluator = Evaluator(MnemosForCausalLM(presets.config("titans-lmm")))
    >>> 100 < evaluator.compute_perplexity(["a text", "another"]) < 1000
    True
    """

    def __init__(self, model: Any, tokenizer: Any = None, piece: int = 2048):
        self.lm = LanguageModel(model, tokenizer, piece)
        self.model, self.tokenizer = model, self.lm.tokenizer

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike, device: str = "cpu", dtype: str = "auto") -> Evaluator:
        """Open a saved model, a run, or a model by its hub name."""
        from .loading import load

        return cls(*load(path, device, dtype))

    def compute_perplexity(self, test_texts: str | Iterable[str]) -> float:
        """Perplexity over all tokens of all texts, with equal weights."""
        return self.perplexity(test_texts).perplexity

    def perplexity(self, texts: str | Iterable[str], **choices) -> Perplexity:
        """Perplexity with bits per byte and by position; see `mnemos.eval.perplexity`."""
        return perplexity(self.lm, None, texts, **choices)

    def perplexity_by_context(self, text: str, contexts: Sequence[int], **choices) -> list[dict]:
        """Perplexity of the same tokens at different context lengths; tokens=, memory=."""
        return perplexity_by_context(self.lm, None, text, contexts, **choices)

    def needle_in_haystack_test(self, needle: str, haystack: str, question: str, **choices) -> dict[str, Any]:
        """A user-defined needle at several depths; see `mnemos.eval.needle_in_haystack_test`."""
        return needle_in_haystack_test(self.lm, None, needle, haystack, question, **choices)

    def needle(self, *, haystack: str | None = None, **choices) -> list[dict]:
        """RULER's single-needle tasks; tasks=, lengths=, depths=, samples=."""
        background = None if haystack is None else Background(haystack, self.tokenizer)
        return needle_suite(self.lm, None, background=background, **choices)

    def babilong(self, *, haystack: str | None = None, **choices) -> list[dict]:
        """BABILong-style questions in a text without sentences that mention the stories; tasks=, lengths=, samples=."""
        background = None if haystack is None else Background(haystack, self.tokenizer, mentions_names)
        return babilong_suite(self.lm, None, background=background, **choices)

    def memory_capacity_test(self, num_pairs: int = 100, **choices) -> dict[str, Any]:
        """The number of facts that are recalled, for each number of facts."""
        return memory_capacity_test(self.lm, None, num_pairs, **choices)

    def context_length_scaling_test(
        self, base_text: str, lengths: Sequence[int] = CONTEXT_LENGTHS, **choices
    ) -> list[dict[str, Any]]:
        """Perplexity, speed and memory use at each length in tokens, in one pass."""
        return context_length_scaling(self.lm, None, base_text, lengths, **choices)

    def vitality(self, text: str, other: str, **choices) -> list[dict[str, Any]]:
        """The same text after more and more tokens of another text, with the memory carried, fresh, and with no test-time learning; lengths=, tokens=."""
        return vitality_suite(self.lm, None, text, other, **choices)

    def mqar(self, **choices) -> list[dict]:
        """Multi-query associative recall over token ids."""
        return mqar_suite(self.model, **choices)

    def mad(self, task: str, **choices) -> dict[str, Any]:
        """One of MAD's tasks over token ids."""
        return mad_score(self.model, task, **choices)

    def commonsense(self, tasks: Iterable[str] = tuple(SOURCES), **choices) -> list[dict]:
        """The papers' commonsense table; source=, limit=."""
        return commonsense_suite(self.lm, None, tasks, **choices)

    def run_full_evaluation(
        self,
        suites: Sequence[str] = usual_suites(with_text=True),
        output: str | os.PathLike | None = None,
        progress: Callable[[int], object] | None = None,
        **settings,
    ) -> dict[str, Any]:
        """Run several suites, with the options of `mnemos eval`; resumable if `output` is a file. text=, haystack=: a file, a folder, or a
        text (of several lines, or longer than a file name)."""
        return run_suites(self.lm, None, suites, EvalSettings(**settings), output, progress=progress)

    def plot_results(self, results: dict[str, Any], path: str | os.PathLike) -> None:
        """Plot the results of `run_full_evaluation`; the file's suffix selects the format (.png, .svg, .pdf)."""
        from .plots import plot_results

        plot_results(results, path)


AtlasEvaluator = Evaluator
