"""Generation that resumes from a cache: `generate`, `state_after`, and the record of a generation that `state_after` reads.

Shapes: B rows of the input; R rows of the output; T new columns; P columns in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList

from .cache import MnemosCache
from .inputs import CheckedInputs

MAX_MASK_NUMEL = 2**28  # two gigabytes; a cache from a file may claim any length


def mask_of_new(cache: MnemosCache, new: Tensor | None, name: str, mask: Tensor | None) -> Tensor | None:
    """The mask (B, P + T) of new tokens (B, T, ...) after those of `cache`, from a mask of T or P + T columns; None for None."""
    if new is None or new.dim() < 2 or new.shape[1] == 0:
        raise ValueError(
            "past_key_values is given, so input_ids must hold the new tokens: (B, T) with at least one column"
        )
    B, T = new.shape[:2]
    if B % cache.batch:
        raise ValueError(
            f"past_key_values has {cache.batch} batch rows, but {name} has {B}; see cache.select and cache.fork"
        )
    if mask is None:
        return None
    check_mask(mask, (B, T), cache.length)
    return with_past(mask, cache.length) if mask.shape[1] == T else mask


def check_mask(mask: Tensor, shape: tuple[int, int], past: int) -> None:
    """Raise a ValueError for a mask that has neither T nor P + T columns, with (B, T) = shape and P = past."""
    if mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] not in (shape[1], past + shape[1]):
        both = f" (the new tokens) or {(shape[0], past + shape[1])} (the past and the new tokens)" if past else ""
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, but {shape}{both} is expected")


def with_past(mask: Tensor, past: int) -> Tensor:
    """Mask of the new tokens (B, T) -> (B, P + T), as transformers expects it with a cache.

    >>> with_past(torch.tensor([[0, 1]]), past=2)
    tensor([[1, 1, 0, 1]])
    """
    if mask.shape[0] * past > MAX_MASK_NUMEL:
        raise ValueError(
            f"the cache has read {past} tokens, and generate keeps a mask of them all for each of its {mask.shape[0]} sequences; "
            "call the model token by token instead"
        )
    return torch.cat([mask.new_ones(mask.shape[0], past), mask], dim=1)


class Record(StoppingCriteria):
    """The inputs of one `generate`, and the ends of its rows. It is passed along as a stopping criterion that never stops.

    past: the cache that generation started from. pieces: inputs and masks (or None), in the order read. columns: of the prompt in
    `sequences`. length: columns of cache and prompt. ends: (rows,) columns of each row without its padding, -1 for a row that has
    not ended by itself; None if no row is padded.
    """

    def __init__(self):
        self.past: MnemosCache | None = None
        self.pieces: list[tuple[dict[str, Any], Tensor | None]] = []
        self.columns, self.length = 0, 0
        self.ends: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def add(self, columns: int, inputs: dict[str, Any]) -> None:
        """Add the inputs of the model's first call; a prompt that is read in chunks has several first calls."""
        if not self.pieces:
            self.past = inputs.get("past_key_values")
            self.length = 0 if self.past is None else self.past.length
        read = {name: inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None}
        new = next(iter(read.values())).shape[1]
        mask = inputs.get("attention_mask")
        self.pieces.append((read, None if mask is None else mask[:, -new:]))
        self.columns, self.length = self.columns + columns, self.length + new

    def lengths(self, outputs) -> Tensor | None:
        """(R,) columns of each of `outputs.sequences` without its padding; None if none is padded."""
        columns = outputs.sequences.shape[1]
        if getattr(outputs, "beam_indices", None) is not None:
            return self.columns + (outputs.beam_indices >= 0).sum(1)
        if self.ends is None or not bool(((self.ends >= 0) & (self.ends < columns)).any()):
            return None
        return self.ends.where(self.ends >= 0, columns).clamp(max=columns)


class RecordedCriteria(StoppingCriteriaList):
    """Stopping criteria that write the end of each row into `record`."""

    record: Record

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        if input_ids.shape[0] > 1:
            ends = (
                self.record.ends if self.record.ends is not None else done.new_full(done.shape, -1, dtype=torch.int64)
            )
            self.record.ends = torch.where(done & (ends < 0), input_ids.shape[1], ends)
        return done


def recorded(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The criteria without the `Record` among them, into which they write the ends of rows. Rows are padded only after an eos."""
    record = next((c for c in criteria if isinstance(c, Record)), None)
    if record is None:
        return criteria
    others = [c for c in criteria if c is not record]
    if not any(hasattr(c, "eos_token_id") for c in others):
        return StoppingCriteriaList(others)
    found = RecordedCriteria(others)
    found.record = record
    return found


class MnemosGenerationMixin(CheckedInputs, GenerationMixin):
    """transformers' generation, with a `MnemosCache` that a later call can resume from."""

    model: Any
    generation_config: Any
    cache_class: type[Any] = MnemosCache

    def _read(self, input_ids: Tensor | None, cache, mask: Tensor | None, embeds: Tensor | None = None) -> Any:
        """The cache after reading tokens (B, T), or their embeddings, from `cache` on, which stays as it is."""
        return self.model.run(input_ids, mask, past_key_values=cache, inputs_embeds=embeds, use_cache=True).cache

    @torch.no_grad()
    def state(
        self, input_ids: Tensor, past_key_values: MnemosCache | None = None, attention_mask: Tensor | None = None
    ) -> MnemosCache:
        """The cache after reading tokens (B, T), to save, to fork, or to resume from with `generate`.

        >>> from mnemos.models import MnemosConfig, MnemosForCausalLM
        >>> model = MnemosForCausalLM(MnemosConfig(hidden_size=32, num_hidden_layers=1, layers="lmm", memory_heads=2))
        >>> cache = model.state(torch.tensor([list(b"a long document")]))
        >>> answer = model.generate(torch.tensor([list(b"?")]), past_key_values=cache, max_new_tokens=2, do_sample=False)
        """
        return self._read(input_ids, past_key_values, attention_mask)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config=None,
        logits_processor=None,
        stopping_criteria=None,
        *args,
        **kwargs,
    ):
        """transformers' `generate`. With `past_key_values`, the input (B, T) holds the new tokens alone, and an attention_mask has their
        columns (B, T), or those of the cache too (B, P + T).

        The cache of the output (return_dict_in_generate=True) does not include the last token, but includes the padding of rows that
        ended early. `state_after(outputs)` returns the cache after exactly the tokens of `outputs.sequences`.
        """
        cache = kwargs.get("past_key_values")
        if isinstance(cache, self.cache_class):
            name = "inputs_embeds" if kwargs.get("inputs_embeds") is not None else "input_ids"
            new = inputs if inputs is not None else kwargs.get(name)
            kwargs["attention_mask"] = mask_of_new(cache, new, name, kwargs.get("attention_mask"))
        chosen = generation_config if generation_config is not None else self.generation_config
        if kwargs.get("return_dict_in_generate", getattr(chosen, "return_dict_in_generate", False)):
            kwargs["record"] = Record()
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), kwargs["record"]])
        outputs = super().generate(inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs)
        if "record" in kwargs:
            outputs.record = kwargs["record"]
        return outputs

    @torch.no_grad()
    def state_after(self, outputs) -> MnemosCache:
        """The cache after exactly the tokens of `outputs.sequences`, without the padding after the end of a sequence.

        outputs: from `generate(..., return_dict_in_generate=True)`. If no sequence was padded, one token is read; otherwise, and after
        beam search, the sequences are read again from the cache that `generate` started from.

        >>> from mnemos.models import MnemosConfig, MnemosForCausalLM
        >>> model = MnemosForCausalLM(MnemosConfig(hidden_size=32, num_hidden_layers=1, layers="lmm", memory_heads=2))
        >>> options = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        >>> first = model.generate(torch.tensor([list(b"Hello.")]), **options)
        >>> cache = model.state_after(first)
        >>> first.past_key_values.get_seq_length(), cache.get_seq_length()
        (8, 9)
        >>> second = model.generate(torch.tensor([list(b"And?")]), past_key_values=cache, **options)
        """
        record = getattr(outputs, "record", None)
        if not isinstance(record, Record):
            raise ValueError(
                f"outputs is a {type(outputs).__name__}, but must be the output of generate(..., return_dict_in_generate=True)"
            )
        sequences, cache, lengths = outputs.sequences, outputs.past_key_values, record.lengths(outputs)
        generated = sequences[:, record.columns :]
        if lengths is None and cache is not None and cache.length == record.length + generated.shape[1] - 1:
            return self.state(sequences[:, -1:], cache)
        R, cache = len(sequences), record.past
        if cache is not None:
            cache = cache.select([row * cache.batch // R for row in range(R)])
        for read, mask in record.pieces:
            B = len(next(iter(read.values())))
            rows = torch.arange(R, device=sequences.device) * B // R
            read = {name: x[rows.to(x.device)] for name, x in read.items()}
            mask = None if mask is None else mask[rows.to(mask.device)]
            cache = self._read(read.get("input_ids"), cache, mask, read.get("inputs_embeds"))
        if lengths is not None:
            columns = torch.arange(record.columns, sequences.shape[1], device=sequences.device)
            lengths = (columns < lengths.to(sequences.device).unsqueeze(1)).long()
        return self.state(generated, cache, lengths)

    def prepare_inputs_for_generation(  # ty: ignore[incompatible-method-override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values=None,
        inputs_embeds=None,
        is_first_iteration: bool | None = False,
        record: Record | None = None,
        **kwargs,
    ):
        """In the first step, every token of the input is new. After it, the cache belongs to `generate` alone: updates are in place."""
        if isinstance(past_key_values, self.cache_class):
            past_key_values.inplace = not is_first_iteration and kwargs.get("use_cache") is not False
            if is_first_iteration:
                next_sequence_length = None
        kwargs |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        kwargs |= {"is_first_iteration": is_first_iteration, "next_sequence_length": next_sequence_length}
        found = super().prepare_inputs_for_generation(input_ids, **kwargs)  # ty: ignore[invalid-argument-type]
        if record is not None and is_first_iteration:
            record.add(input_ids.shape[1], found)
        return found

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        """The mask of an input without one, with the columns of the cache, as transformers expects it."""
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get("past_key_values")
        return with_past(mask, cache.length) if isinstance(cache, self.cache_class) else mask

    def _get_stopping_criteria(self, *args, **kwargs) -> StoppingCriteriaList:
        return recorded(super()._get_stopping_criteria(*args, **kwargs))  # ty: ignore[invalid-argument-type]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
