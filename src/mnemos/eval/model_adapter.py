"""Adapter of causal language models for the evaluations: read, score, continue. Long texts are streamed through the state in pieces.

Shapes: B batch rows, T tokens, V vocabulary, O options.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tasks import ByteTokenizer, encode
from ..data.tasks.text import check_tokenizer

ROWS_AT_ONCE = 16  # continuations decoded together
LOGITS_AT_ONCE = 1 << 24  # limits the length of a piece, so that its logits stay below this many numbers
Ids = Sequence[int] | np.ndarray | Tensor


@dataclass
class Past:
    """The state after `length` tokens, and log p of every next token (V,)."""

    state: Any
    log_p: Tensor
    length: int


class LanguageModel:
    """Any causal language model with a tokenizer: ours, one of transformers, or any module that takes
    (input_ids (B, T), past_key_values=, use_cache=True) and returns .logits (B, T, V) and .past_key_values.

    piece: tokens per call when a text is streamed; the result does not depend on it.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> lm = LanguageModel(MnemosForCausalLM(presets.config("titans-lmm")))
    >>> past = lm.read([list(b"The answer is")])
    >>> past.length, len(lm.score(past, [list(b" yes"), list(b" no")]))
    (13, 2)
    """

    def __init__(self, model: Any, tokenizer: Any = None, piece: int = 2048):
        self.model, self.tokenizer = model, ByteTokenizer() if tokenizer is None else tokenizer
        check_tokenizer(self.tokenizer)
        if not callable(model):
            raise ValueError(
                f"model is a {type(model).__name__}, but must be a language model: Evaluator.from_pretrained(path) opens one"
            )
        if hasattr(model, "eval"):
            model.eval()
        names = inspect.signature(model.forward if hasattr(model, "forward") else model).parameters
        self._keeps = "logits_to_keep" in names
        self.config = getattr(model, "config", None)
        self.vocab_size = int(getattr(self.config, "vocab_size", 0) or self.tokenizer.vocab_size)
        self.piece = max(1, min(piece, LOGITS_AT_ONCE // self.vocab_size))

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> LanguageModel:
        """`model` itself if it is an adapter already, else an adapter of it."""
        return model if isinstance(model, cls) else cls(model, tokenizer)

    @property
    def device(self) -> torch.device:
        parameters = self.model.parameters() if hasattr(self.model, "parameters") else iter(())
        return next((p.device for p in parameters), torch.device("cpu"))

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens the model can read; None for no limit (positions of our models are counted by their state)."""
        if getattr(self.config, "model_type", None) == "mnemos" or self.config is None:
            return None
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)

    @property
    def prefix(self) -> int | None:
        """The token in front of a text: the tokenizer's bos or eos token, as in lm-evaluation-harness."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return bos if bos is not None else getattr(self.tokenizer, "eos_token_id", None)

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids])

    @torch.no_grad()
    def call(self, ids: Tensor, state: Any = None, keep: int = 0) -> tuple[Tensor, Any]:
        """Logits (B, T, V) of ids (B, T), or of the last `keep` tokens, in float32 or wider, and the state after them."""
        extra: dict[str, Any] = {"logits_to_keep": keep} if keep and self._keeps else {}
        done = self.model(input_ids=ids.to(self.device), past_key_values=state, use_cache=True, **extra)
        logits = done.logits[:, -keep:] if keep else done.logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), done.past_key_values

    def read(self, pieces: Iterable[Ids], past: Past | None = None) -> Past:
        """Read a text in pieces and keep only the state: constant memory for any length, if the state is constant."""
        state, length, logits = (None, 0, None) if past is None else (fork(past.state, 1), past.length, None)
        for ids in self.pieces_of(pieces):
            logits, state = self.call(ids, state, keep=1)
            length += ids.shape[1]
        if logits is None:
            if past is None:
                raise ValueError("there is nothing to read: give at least one token")
            return past
        return Past(state, logits[0, -1].log_softmax(-1), length)

    def losses(self, pieces: Iterable[Ids], past: Past | None = None) -> Iterator[Tensor]:
        """-log p of every token of a text, given the previous ones (and `past`), in pieces, on the CPU.

        Without a past, the first token has no loss.
        """
        state = None if past is None else fork(past.state, 1)
        before = None if past is None else past.log_p[None]  # 1 V
        coming = self.pieces_of(pieces)
        ids = next(coming, None)
        while ids is not None:
            following = next(coming, None)
            inputs = ids if following is not None else ids[:, :-1]  # the last token has no successor to predict
            targets = ids[0, 1:] if before is None else ids[0]
            after = [] if before is None else [before]
            if inputs.shape[1]:
                logits, state = self.call(inputs, state)
                after.append(logits[0].log_softmax(-1))  # T V
            if len(targets):
                log_p = torch.cat(after)[: len(targets)]
                yield -log_p.gather(1, targets.to(log_p.device)[:, None]).squeeze(1).cpu()
            before, ids = after[-1][-1:].clone() if after else None, following

    def pieces_of(self, pieces: Iterable[Ids]) -> Iterator[Tensor]:
        """The same tokens in pieces (1, T) of `piece` tokens, the last one shorter, for input pieces of any size."""
        waiting: list[Tensor] = []
        count = 0
        for piece in pieces:
            ids = torch.as_tensor(np.asarray(piece), dtype=torch.long)
            while count + len(ids) >= self.piece:
                cut = self.piece - count
                yield torch.cat([*waiting, ids[:cut]])[None]
                ids, waiting, count = ids[cut:], [], 0
            if len(ids):
                waiting.append(ids)
                count += len(ids)
        if waiting:
            yield torch.cat(waiting)[None]

    def score(self, past: Past, options: Sequence[Sequence[int]]) -> list[float]:
        """log p of each option, a list of ids, directly after `past`."""
        return [float(x.sum()) for x in self.option_scores(past, options)]

    def option_scores(self, past: Past, options: Sequence[Sequence[int]]) -> list[Tensor]:
        """log p of each token of each option, directly after `past`."""
        return [scores for scores, _ in self.option_details(past, options)]

    def option_details(self, past: Past, options: Sequence[Sequence[int]]) -> list[tuple[Tensor, bool]]:
        """log p of each token of each option, and whether it is the argmax."""
        if any(len(option) == 0 for option in options):
            raise ValueError("an option has no token")
        longest, first = max(map(len, options)), past.log_p[None].cpu()  # 1 V
        rows: Sequence[Tensor] = [first[:0]] * len(options)
        if longest > 1:
            ids = torch.zeros(
                len(options), longest - 1, dtype=torch.long
            )  # O T: padded on the right, which nothing before sees
            for row, option in zip(ids, options):
                row[: len(option) - 1] = torch.as_tensor(np.asarray(option[:-1]), dtype=torch.long)
            logits, _ = self.call(ids, fork(past.state, len(options)))
            rows = list(logits.log_softmax(-1).cpu())
        found = []
        for row, option in zip(rows, options):
            targets = torch.as_tensor(np.asarray(option), dtype=torch.long)
            log_p = torch.cat([first, row[: len(option) - 1].to(first)])
            scores = log_p.gather(1, targets[:, None]).squeeze(1)
            found.append((scores, bool((log_p.argmax(-1) == targets).all())))
        return found

    def choice(self, past: Past, options: Sequence[str], right: int) -> float:
        """1 if the correct option is the likeliest per token after `past` and a blank, else 0. Ties share the score, so that a model which
        cannot distinguish the options scores at chance."""
        scores = [float(x.mean()) for x in self.option_scores(past, [self.encode(f" {option}") for option in options])]
        tied = [i for i, score in enumerate(scores) if score == max(scores)]
        return 1 / len(tied) if right in tied else 0.0

    def continue_from(self, past: Past, max_new_tokens: int, stop: Sequence[str] = ()) -> str:
        """The greedy continuation as text, up to the first `stop` string, the tokenizer's end token, or the given number of tokens."""
        return next(self.continue_all([(past, max_new_tokens, stop)]))

    def continue_all(self, asked: Iterable[tuple[Past, int, Sequence[str]]]) -> Iterator[str]:
        """`continue_from` for each state, in order. States that can be stacked are decoded `ROWS_AT_ONCE` at a time, at any lengths; others
        one at a time."""
        waiting: list[tuple[Past, int, Sequence[str]]] = []
        for one in asked:
            waiting.append(one)
            if len(waiting) == ROWS_AT_ONCE or not can_stack(one[0].state):
                yield from self._continue(waiting)
                waiting = []
        if waiting:
            yield from self._continue(waiting)

    def _continue(self, asked: Sequence[tuple[Past, int, Sequence[str]]]) -> list[str]:
        """One batch row per state, decoded until the last one has ended."""
        pasts, rooms, stops = zip(*asked)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        ids: list[list[int]] = [[] for _ in pasts]
        state = fork(pasts[0].state, 1) if len(pasts) == 1 else type(pasts[0].state).stack([p.state for p in pasts])
        log_p = torch.stack([past.log_p for past in pasts])  # B V
        going = [room > 0 for room in rooms]
        while any(going):
            tokens = log_p.argmax(-1).tolist()
            for row, token in enumerate(tokens):
                if going[row] and token != eos:
                    ids[row].append(token)
                    text = self.decode(ids[row]) if stops[row] else ""
                    going[row] = len(ids[row]) < rooms[row] and not any(s in text for s in stops[row])
                else:
                    going[row] = False
            if any(going):
                logits, state = self.call(torch.tensor(tokens)[:, None], state, keep=1)
                log_p = logits[:, -1].log_softmax(-1)
        said = [self.decode(row) for row in ids]
        for row, stop in enumerate(stops):
            for s in stop:
                said[row] = said[row].split(s)[0]
        return said


def can_stack(state: Any) -> bool:
    """Whether batch rows at different positions can be joined, in memory that does not grow with the text."""
    return hasattr(state, "stack") and not getattr(state, "is_kv_cache", True)


def fork(state: Any, copies: int) -> Any:
    """A state's row repeated `copies` times, for calls that must not change the given state. Calls never change a `MnemosCache`."""
    if state is None:
        return None
    if hasattr(state, "fork"):
        return state if copies == 1 and not getattr(state, "advances_in_place", False) else state.fork(copies)
    state = copy.deepcopy(state)
    if copies > 1:
        state.batch_repeat_interleave(copies)
    return state


def state_bytes(state: Any) -> int | None:
    """Bytes of a state: reported by our caches, counted from the layers' tensors for transformers' caches."""
    if hasattr(state, "nbytes"):
        return int(state.nbytes)
    layers = getattr(state, "layers", None)
    if layers is None:
        return None
    tensors = [x for layer in layers for x in vars(layer).values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)
