"""The registry of suites, which `mnemos eval` and `Evaluator.run_full_evaluation` run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..choices import unknown
from ..data.tasks import MQAR_PRESETS, NEEDLE_TASKS, Background
from ..data.tasks.babilong import mentions_names
from ..data.tasks.background import read_texts
from ..memory.freeze import has_memory
from . import headlines, panels
from .babilong import babilong_suite, load_public, public_babilong
from .commonsense import commonsense_suite
from .length import context_length_scaling
from .mad import MAD_TASKS, mad_score
from .model_adapter import LanguageModel
from .needle import needle_suite
from .pair_recall import capacity_suite
from .panels import Panel, Rows
from .recall import ProgressCallback, mqar_suite
from .settings import EvalSettings
from .text_loss import perplexity, perplexity_by_context
from .vitality import vitality_suite
from .vitality import work as vitality_work

Run = Callable[["Context", ProgressCallback | None], Rows]


@dataclass
class Context:
    """A model, its settings, and texts that are read and tokenised once for all suites."""

    lm: LanguageModel
    settings: EvalSettings
    has_text: bool = True
    _backgrounds: dict[bool, Background] = field(default_factory=dict)

    def texts(self) -> list[str]:
        if self.settings.text is None:
            raise ValueError("this suite needs a text: give --text FILE (or a folder of .txt files)")
        return read_texts(self.settings.text)[: self.settings.limit]

    def background(self, strict: bool) -> Background | None:
        """The haystack; strict: without sentences that mention the BABILong stories."""
        place = self.settings.haystack or self.settings.text
        if strict not in self._backgrounds:
            texts = embedded_texts() if place is None else read_texts(place)
            if texts is None:
                return None
            self._backgrounds[strict] = Background(texts, self.lm.tokenizer, mentions_names if strict else None)
        return self._backgrounds[strict]

    def lengths(self) -> list[int]:
        """The lengths that the model can read."""
        most = self.lm.max_length
        kept = [n for n in self.settings.lengths if most is None or n <= most]
        if not kept:
            raise ValueError(f"lengths={self.settings.lengths} all exceed the {most} tokens that this model can read")
        return kept


def label(name: str) -> str:
    """A column of rows, or a kind of memory, as tables name it.

    >>> label("bits_per_byte"), label("frozen")
    ('bits per byte', 'no test-time learning')
    """
    return "no test-time learning" if name == "frozen" else name.replace("_", " ")


def embedded_texts() -> list[str] | None:
    """The embedded text of `mnemos.data` as a haystack, if available."""
    try:
        return list(importlib.import_module("mnemos.data.embedded").documents())
    except (ImportError, ValueError):
        return None


@dataclass(frozen=True)
class Suite:
    """A suite of `mnemos eval`.

    about: one line of help. run: measures a model and returns rows. columns: columns of the table (default: all).
    reads_text: needs a model with a tokenizer. needs_text: needs `EvalSettings.text`. usual: runs if no suite is named.
    work: total units of progress, if known in advance. plot: plots its rows. headline: its numbers in a comparison of models.
    """

    name: str
    about: str
    run: Run
    columns: tuple[str, ...]
    reads_text: bool = True
    work: Callable[[Context], int | None] = lambda context: None
    needs_text: bool = False
    usual: bool = False
    plot: Panel | None = None
    headline: headlines.Choose | None = None


SUITES: dict[str, Suite] = {}


def register_suite(name: str, about: str, columns: Sequence[str] = (), **choices) -> Callable[[Run], Run]:
    """Decorator: registers a function (context, progress) -> rows as the suite NAME; the keywords are the fields of `Suite`.

    >>> @register_suite("vocabulary", "the number of tokens", ["tokens"])
    ... def vocabulary(context, progress):
    ...     return [{"tokens": context.lm.vocab_size}]
    >>> SUITES.pop("vocabulary").about
    'the number of tokens'
    """
    if name in SUITES:
        raise ValueError(f"suite {name!r} is registered already: choose another name")

    def register(run: Run) -> Run:
        SUITES[name] = Suite(name, about, run, tuple(columns), **choices)
        return run

    return register


def usual_suites(with_text: bool) -> tuple[str, ...]:
    """The suites that run if none is named.

    >>> usual_suites(with_text=False)
    ('needle', 'babilong', 'capacity')
    """
    return tuple(name for name, suite in SUITES.items() if suite.usual and (with_text or not suite.needs_text))


@register_suite(
    "perplexity",
    "perplexity of a text: all tokens, by position, by context length, with and without test-time learning",
    ("what", "memory", "tokens", "perplexity", "bits_per_byte"),
    needs_text=True,
    usual=True,
    plot=panels.by_position,
    headline=headlines.perplexity,
)
def _perplexity(c: Context, progress: ProgressCallback | None) -> Rows:
    s, rows = c.settings, []
    texts = c.texts()
    kinds = ["learning", "frozen"] if has_memory(c.lm.model) else ["learning"]
    for memory in kinds:
        found = perplexity(c.lm, None, texts, s.window, s.stride, memory, progress).as_dict()
        places = found.pop("by_position")
        name = memory if len(kinds) > 1 else "-"
        rows.append({"what": "all tokens", "memory": name} | found)
        rows += [
            {"what": f"positions {p['start']}…{p['stop'] - 1}", "memory": name}
            | {k: p[k] for k in ("tokens", "loss", "perplexity")}
            for p in places
        ]
    if s.contexts:
        longest = max(texts, key=len)
        for memory in kinds:
            for row in perplexity_by_context(c.lm, None, longest, s.contexts, memory=memory):
                name = memory if len(kinds) > 1 else "-"
                rows.append({"what": f"context {row.pop('context')}", "memory": name} | row)
    return rows


def _needles(c: Context) -> list[str]:
    """The needle tasks for which there is a haystack; unknown names raise an error later."""
    return [
        t for t in c.settings.needles if (t in NEEDLE_TASKS and NEEDLE_TASKS[t].noise) or c.background(strict=False)
    ]


@register_suite(
    "needle",
    "RULER's single-needle tasks, depth by length",
    ("task", "length", "depth", "generated", "likelihood", "chance"),
    work=lambda c: len(_needles(c)) * len(c.lengths()) * len(c.settings.depths) * c.settings.samples,
    usual=True,
    plot=panels.grid,
    headline=headlines.mean_of("needle", "generated", "likelihood"),
)
def _needle(c: Context, progress: ProgressCallback | None) -> Rows:
    s, background = c.settings, c.background(strict=False)
    tasks = _needles(c)
    if not tasks:
        raise ValueError("these needles need a text: give --haystack FILE (only passkey has its own)")
    return needle_suite(
        c.lm,
        None,
        tasks,
        c.lengths(),
        s.depths,
        s.samples,
        background,
        generate=s.generate,
        seed=s.seed,
        progress=progress,
    )


@register_suite(
    "babilong",
    "facts scattered over a long text",
    ("task", "length", "generated", "likelihood", "chance", "tokens_per_second", "state_bytes"),
    usual=True,
    plot=panels.by_length,
    headline=headlines.mean_of("babilong", "generated", "likelihood"),
)
def _babilong(c: Context, progress: ProgressCallback | None) -> Rows:
    s = c.settings
    if s.babilong_data is not None:
        found = []
        for task in s.stories:
            records = load_public(task, s.babilong_length, s.babilong_data)
            records = list(records)[: s.samples] if s.samples else records
            found.append(
                {"length": s.babilong_length} | public_babilong(c.lm, None, records, task, s.generate, progress)
            )
        return found
    background = c.background(strict=True)
    lengths = [0] + ([] if background is None else c.lengths())
    return babilong_suite(c.lm, None, s.stories, lengths, s.samples, background, s.generate, s.seed, progress)


@register_suite(
    "mqar",
    "multi-query associative recall",
    ("pairs", "length", "accuracy", "exact", "chance"),
    reads_text=False,
    work=lambda c: sum(c.settings.examples or count for *_, count in MQAR_PRESETS.get(c.settings.mqar, [])),
    plot=panels.line("pairs", "accuracy", chance=True),
    headline=headlines.mean_of("mqar", "accuracy"),
)
def _mqar(c: Context, progress: ProgressCallback | None) -> Rows:
    return mqar_suite(
        c.lm.model, c.settings.mqar, examples=c.settings.examples, seed=c.settings.seed, progress=progress
    )


@register_suite(
    "mad",
    "MAD's tasks over token ids",
    ("task", "accuracy", "classwise", "exact"),
    reads_text=False,
    plot=panels.bars,
    headline=headlines.mean_of("mad", "accuracy"),
)
def _mad(c: Context, progress: ProgressCallback | None) -> Rows:
    wrong = [t for t in c.settings.mad if t not in MAD_TASKS]
    if wrong:
        raise unknown("task", wrong[0], MAD_TASKS)
    fitting = [t for t in c.settings.mad if MAD_TASKS[t].baseline["vocab_size"] <= c.lm.vocab_size]
    if not fitting:
        raise ValueError(f"the model's vocabulary of {c.lm.vocab_size} is too small for {', '.join(c.settings.mad)}")
    rows = [mad_score(c.lm.model, t, c.settings.examples, seed=c.settings.seed + 1, progress=progress) for t in fitting]
    return [{k: v for k, v in row.items() if k != "settings"} for row in rows]


@register_suite(
    "capacity",
    "the number of facts that a model recalls",
    ("pairs", "tokens", "recalled", "recall", "chosen", "chance"),
    work=lambda c: sum(c.settings.pairs),
    usual=True,
    plot=panels.line("pairs", "recall", "chosen", chance=True),
    headline=headlines.at_most("recall of {} facts", "pairs", "recall"),
)
def _capacity(c: Context, progress: ProgressCallback | None) -> Rows:
    return capacity_suite(c.lm, None, c.settings.pairs, seed=c.settings.seed, progress=progress)


@register_suite(
    "length",
    "perplexity, speed and memory use by context length",
    ("length", "perplexity", "tail_perplexity", "tokens_per_second", "state_bytes", "resident_mb"),
    work=lambda c: max(c.lengths()),
    needs_text=True,
    usual=True,
    plot=panels.line("length", "perplexity", "tail_perplexity"),
    headline=headlines.at_most("perplexity of {} tokens", "length", "perplexity", False, False),
)
def _length(c: Context, progress: ProgressCallback | None) -> Rows:
    lengths = c.lengths()
    joined = "\n\n".join(c.texts())
    return context_length_scaling(c.lm, None, joined, lengths, progress=progress)


@register_suite(
    "vitality",
    "the same text after more and more tokens of other text: state carried, fresh, and with no test-time learning (frozen); effective rank, relearning",
    ("length", "carried", "fresh", "frozen", "effective_rank", "distance", "relearning"),
    work=lambda c: vitality_work(c.settings.stream_lengths, c.settings.stream_text),
    plot=panels.vitality,
    headline=headlines.at_most("bits after {} tokens", "length", "carried", False, False),
)
def _vitality(c: Context, progress: ProgressCallback | None) -> Rows:
    s, background = c.settings, c.background(strict=False)
    if background is None:
        raise ValueError("this suite needs a text: give --text FILE (or a folder of .txt files)")
    text, other = background.ids[-s.stream_text :], background.ids[: -s.stream_text]
    if s.text is not None and s.haystack is not None:
        text, other = np.asarray(c.lm.encode("\n\n".join(c.texts()))), background.ids
    if not len(other):
        raise ValueError(
            f"the text has {len(text):,} tokens, but vitality reads {s.stream_text:,} of them after the others: "
            "give a longer text, another one as --haystack, or a smaller --stream-text"
        )
    return vitality_suite(c.lm, None, text, other, s.stream_lengths, s.stream_text, progress)


@register_suite(
    "commonsense",
    "LAMBADA, PIQA, HellaSwag, WinoGrande, ARC, SIQA, BoolQ",
    ("task", "questions", "accuracy", "normalised", "perplexity"),
    plot=panels.bars,
    headline=headlines.mean_of("commonsense", "accuracy"),
)
def _commonsense(c: Context, progress: ProgressCallback | None) -> Rows:
    s = c.settings
    return commonsense_suite(c.lm, None, s.commonsense, s.commonsense_data, s.limit, progress)


@register_suite("harness", "any task of lm-evaluation-harness")
def _harness(c: Context, progress: ProgressCallback | None) -> Rows:
    s = c.settings
    if not s.harness:
        raise ValueError(
            "the suite harness needs tasks: give --harness TASK (and --include-path FOLDER for tasks of your own)"
        )
    from .harness import run_harness

    found = run_harness(
        c.lm, c.lm.tokenizer, list(s.harness), s.include_path, s.limit, {"max_seq_lengths": c.lengths()}
    )
    return [{"task": task} | scores for task, scores in found.items()]


def check_names(names: Sequence[str]) -> list[Suite]:
    """The suites with these names."""
    wrong = [name for name in names if name not in SUITES]
    if wrong:
        raise unknown("suite", wrong[0], SUITES)
    if not names:
        raise ValueError(f"name at least one suite: {', '.join(SUITES)}")
    return [SUITES[name] for name in dict.fromkeys(names)]


def default_output(path: str | os.PathLike) -> Path:
    """The default results file of a model: eval.json in its folder; for a hub name, in the working folder."""
    folder = Path(path)
    return folder / "eval.json" if folder.is_dir() else Path(f"{str(path).strip('/').replace('/', '--')}.eval.json")
