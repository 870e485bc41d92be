"""`Subject`: one way to call any causal language model: its logits, its state, its padding, its loss.

Shapes: B batch rows, T tokens, V vocabulary, P tokens before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .states import select_rows

STATE_NAMES = ("past_key_values", "cache_params", "state", "states", "cache", "memory_state", "past", "hidden")
STANDARD = ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "labels")
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")


class Subject:
    """A model under test. It may be of Mnemos, of transformers, or any callable from token ids (B, T) to logits (B, T, V).

    A callable returns the logits alone, (logits, state), a mapping, or an object with `.logits`. If a parameter of its forward is named
    as in `STATE_NAMES`, the state that it returns is handed back under that name. `attention_mask`, `position_ids`, `labels` and
    `use_cache` are given where forward has them.

    >>> def bigram(input_ids):
    ...     return torch.eye(5)[input_ids]
    >>> subject = Subject(bigram)
    >>> subject.vocab_size, subject.has_state, subject.logits(torch.tensor([[1, 2]])).shape
    (5, False, torch.Size([1, 2, 5]))
    """

    def __init__(self, model: Any, vocab_size: int | None = None):
        if not callable(model):
            raise ValueError(
                f"the model is a {type(model).__name__}, but must be a language model: a callable from token ids (B, T) to logits"
            )
        self.model = model
        self.config = getattr(model, "config", None)
        self.names = _parameters(model)
        self.device = next((p.device for p in self.parameters()), torch.device("cpu"))
        self.state_name = next((name for name in STATE_NAMES if name in self.names), None)
        self.has_mask, self.has_labels = "attention_mask" in self.names, "labels" in self.names
        logits, state = self._first_call()
        self.logits_size, self.dtype = logits.shape[-1], logits.dtype
        known = vocab_size or int(getattr(self.config, "vocab_size", 0) or 0) or self.logits_size
        self.vocab_size = min(known, self.logits_size)
        self.has_state = state is not None

    def _first_call(self) -> tuple[Tensor, Any]:
        """Logits and state of a few tokens; raises a ValueError of one sentence for a model that cannot be called."""
        problem = ""
        for length in (1, 8, 64):  # some models want a certain length
            try:
                return self.step(torch.zeros(1, length, dtype=torch.long))
            except MemoryError:
                raise
            except Exception as wrong:  # a stranger's model may raise anything
                lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
                problem = problem or f"{type(wrong).__name__}: {lines[0] if lines else 'no message'}"
        raise ValueError(f"the model cannot be called with token ids (1, 1): {problem:.300}")

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters()) if isinstance(self.model, nn.Module) else []

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens that the model can read, by its config; None: no limit is known."""
        if self.config is None or getattr(self.config, "model_type", None) == "mnemos":
            return None
        config = getattr(self.config, "base_config", self.config)  # of an attached model
        found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return int(found) if found else None

    @property
    def special_ids(self) -> set[int]:
        """Ids that texts do not contain."""
        found = [getattr(self.config, name, None) for name in SPECIAL_IDS]
        ids = {i for x in found for i in (x if isinstance(x, list | tuple) else [x]) if type(i) is int}
        return {i for i in ids if 0 <= i < self.vocab_size}

    @torch.no_grad()
    def logits(self, ids: Tensor, mask: Tensor | None = None, use_cache: bool = False) -> Tensor:
        """ids (B, T) -> (B, T, V), in one call without an earlier state."""
        return self._call(ids, None, mask, use_cache)[0]

    def differentiable_logits(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> (B, T, V), with gradients if they are recorded."""
        return self._call(ids, None, None, False)[0]

    @torch.no_grad()
    def step(self, ids: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """ids (B, T) after the tokens of `state` -> logits (B, T, V) and the state after them. mask: (B, P + T).

        The call may change the given state, as those of transformers do.
        """
        return self._call(ids, state, mask, True)

    def in_pieces(self, ids: Tensor, sizes: Sequence[int], mask: Tensor | None = None, whole: bool = True) -> Tensor:
        """ids (B, T), read in calls of these many tokens -> (B, T, V).

        mask: (B, T). whole: later calls get the mask of all tokens so far, as attention needs it; else of the first call alone, as
        `generate` of transformers does it for recurrent models.
        """
        state, start, parts = None, 0, []
        for size in sizes:
            seen = None if mask is None or (start and not whole) else mask[:, : start + size]
            logits, state = self.step(ids[:, start : start + size], state, seen)
            parts.append(logits)
            start += size
        return torch.cat(parts, 1)

    def loss(self, ids: Tensor) -> Tensor | None:
        """The loss that the model itself reports for labels equal to ids (B, T); None if it reports none."""
        found = self._invoke(ids, {"labels": ids.to(self.device)} | self._inputs(ids, None, None, False))
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        return loss if isinstance(loss, Tensor) else None

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """The state with these batch rows; may change the given one. None if the form of the state is unknown."""
        return select_rows(state, torch.tensor(list(rows), device=self.device))

    def _call(self, ids: Tensor, state: Any, mask: Tensor | None, use_cache: bool) -> tuple[Tensor, Any]:
        found = self._invoke(ids, self._inputs(ids, state, mask, use_cache))
        logits, new = _outputs(found, self.state_name)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"the model returns {shape} for ids {tuple(ids.shape)}, but must return logits (B, T, V)")
        return logits, new if use_cache and self.state_name else None

    def _invoke(self, ids: Tensor, inputs: dict[str, Any]) -> Any:
        ids = ids.to(self.device)
        return self.model(input_ids=ids, **inputs) if "input_ids" in self.names else self.model(ids, **inputs)

    def _inputs(self, ids: Tensor, state: Any, mask: Tensor | None, use_cache: bool) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if state is not None and self.state_name is not None:
            inputs[self.state_name] = state
        if "use_cache" in self.names:
            inputs["use_cache"] = use_cache
        if mask is not None:
            mask = mask.to(self.device)
            inputs["attention_mask"] = mask
            if "position_ids" in self.names:  # as `generate` of transformers gives them
                inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return inputs


def _parameters(model: Any) -> tuple[str, ...]:
    """The names of the parameters of a model's forward; those of transformers for one that hides them behind **kwargs."""
    function: Callable = model.forward if isinstance(model, nn.Module) else model
    found = inspect.signature(function).parameters
    hidden = any(p.kind is p.VAR_KEYWORD for p in found.values()) and "input_ids" not in found
    return STANDARD if hidden and hasattr(model, "config") else tuple(found)


def _outputs(found: Any, state_name: str | None) -> tuple[Any, Any]:
    """Logits and state of whatever a model returns."""
    if isinstance(found, Tensor):
        return found, None
    if isinstance(found, tuple) and not hasattr(found, "logits"):
        return found[0], found[1] if len(found) > 1 else None
    get = found.get if isinstance(found, Mapping) else lambda name: getattr(found, name, None)
    return get("logits"), get(state_name) if state_name else None
