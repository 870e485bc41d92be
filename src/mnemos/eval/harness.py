"""Adapter for lm-evaluation-harness that streams documents of any length through the state.

`lm_eval --model hf` also works for our checkpoints, but cuts documents into windows. `StreamingLM` does not: `loglikelihood_rolling` is
the perplexity of the whole document, a context is read once for all its continuations, and nothing is cut off.

        import mnemos.eval.harness                                        # registers "mnemos" as a model of lm_eval
    lm_eval.simple_evaluate(model="mnemos", model_args={"pretrained": "runs/x/export"}, tasks=["..."])
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import lm_eval.models  # noqa: F401  lm_eval fills its registry of models only while it is empty
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from .model_adapter import LanguageModel, Past
from .text_loss import document_losses


@register_model("mnemos")
class StreamingLM(TemplateLM):
    """A causal language model in lm-evaluation-harness. pretrained: a model, a folder or a hub name; tokenizer: an object, or None for
    the folder's own (default: bytes). piece: tokens per call.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        device: str = "cpu",
        dtype: str = "auto",
        piece: int = 2048,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        **unused,
    ):
        super().__init__()
        if isinstance(pretrained, str | os.PathLike):
            from .loading import load

            pretrained, found = load(pretrained, device=device, dtype=dtype)
            tokenizer = tokenizer or found
        self.lm = LanguageModel(pretrained, tokenizer, int(piece))
        self.tokenizer, self._max_gen_toks = self.lm.tokenizer, int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        end = getattr(self.tokenizer, "eos_token_id", None)
        return self.prefix_token_id if end is None else end

    @property
    def prefix_token_id(self) -> int:
        if self.lm.prefix is None:
            raise ValueError("the tokenizer has neither a bos nor an eos token to start an empty context with")
        return self.lm.prefix

    @property
    def tokenizer_name(self) -> str:
        return getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.lm.encode(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """Each context is read once, and its continuations are scored together."""
        order = sorted(range(len(requests)), key=lambda i: tuple(requests[i][1]))
        result: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for _, group in groupby(order, key=lambda i: tuple(requests[i][1])):
            same = list(group)
            past = self.lm.read([requests[same[0]][1]])
            options = [requests[i][2] for i in same]
            for i, (scores, greedy) in zip(same, self.lm.option_details(past, options)):
                result[i] = (float(scores.double().sum()), bool(greedy))
        return result

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole documents, each streamed through the state, after a bos or eos token."""
        assert self.prefix_token_id is not None
        found = []
        for request in requests:
            ids = np.asarray(self.tok_encode(request.args[0]), dtype=np.int64)
            found.append(-sum(float(losses.double().sum()) for _, losses in document_losses(self.lm, ids)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations. Sampling raises an error, because scores must be reproducible."""

        def asked() -> Iterator[tuple[Past, int, list[str]]]:
            for request in requests:
                context, options = request.args
                if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                    raise ValueError(
                        "this model of lm_eval decodes greedily; use do_sample: false, or --model hf for sampling"
                    )
                until = options.get("until") or []
                until = [until] if isinstance(until, str) else list(until)
                room = int(options.get("max_gen_toks", self._max_gen_toks))
                yield self.lm.read([self.tok_encode(context)]), room, [stop for stop in until if stop]

        return list(self.lm.continue_all(asked()))


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    include_path: str | os.PathLike | None = None,
    limit: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness, its own or those of a folder of YAML files, with the streaming adapter. Returns scores by task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = None
    if include_path is not None:  # indexing lm_eval's thousands of tasks takes seconds
        manager = TaskManager(include_path=str(include_path), include_defaults=False, metadata=metadata)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        path = None if include_path is None else str(include_path)
        manager = TaskManager(include_path=path, metadata=metadata)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise ValueError(
            f"lm_eval has no task {unknown[0]!r}; `lm_eval ls tasks` lists them, --include-path adds your own"
        )
    adapter = StreamingLM(model.model if isinstance(model, LanguageModel) else model, tokenizer)
    done = simple_evaluate(adapter, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0)
    if done is None:
        raise ValueError("lm_eval returned no results; only the first process of several gets them")
    return {
        task: {name: value for name, value in scores.items() if isinstance(value, int | float)}
        for task, scores in done["results"].items()
    }
