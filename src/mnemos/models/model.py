"""The models: a stack of blocks behind an embedding, and the language model on top of it, both at home in transformers.

Shapes: B, T as given; R rows of L tokens (see rows.py); N persistent tokens; D hidden size; V vocabulary.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, initialization
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..memory.files import one_line
from ..nn.linear import Linear
from ..nn.norm import RMSNorm
from .blocks import Block
from .cache import MnemosCache
from .config import MnemosConfig
from .decoding import Decoder
from .folder import (
    check_files,
    check_finite,
    check_inside,
    check_names,
    check_shapes,
    dtype_name,
    expected_shapes,
    own_names,
    read_shapes,
)
from .generation import Record, check_mask, mask_of_new, recorded, with_past
from .inputs import CheckedInputs, check_embeds, check_labels, check_tensors, embed
from .loss import IGNORED, cross_entropy
from .packing import Rows, rows_of, starts_from_lengths, starts_from_positions

ALLOW_MISSING: ContextVar[bool] = ContextVar("ALLOW_MISSING", default=False)  # for the model that is being opened


class MnemosPreTrainedModel(PreTrainedModel):
    """What both models share with transformers."""

    config_class = MnemosConfig
    config: MnemosConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, *args, allow_missing: bool = False, **kwargs):
        """transformers' `from_pretrained`, for weights that are complete, finite and of their config; others are refused.

        allow_missing: initialise tensors that the weights lack as in a new model, and leave out those that the model lacks.
        A device_map may place layers on any devices, but not offload them: layers read weights of their parts themselves, and
        accelerate brings those back only where a part is called.
        """
        name = pretrained_model_name_or_path
        if name is not None and os.path.isdir(name) and kwargs.get("gguf_file") is None:
            check_files(Path(name) / kwargs.get("subfolder", ""))
        if name is not None:
            kwargs.setdefault("use_safetensors", True)
        wants_info = kwargs.pop("output_loading_info", False)
        lenient = allow_missing or kwargs.get("key_mapping") is not None
        token = ALLOW_MISSING.set(lenient)
        try:
            found: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
            model, info = found
        except (SafetensorError, RecursionError, AttributeError, LookupError, TypeError) as broken:  # of crafted files
            raise ValueError(f"{name} cannot be opened: {one_line(broken)}") from broken
        finally:
            ALLOW_MISSING.reset(token)
        places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                f"device_map places weights on {', '.join(sorted(places))}, which offloads some of them; "
                "use device_map='cpu', or devices that hold all of them"
            )
        where = "state_dict" if name is None else str(name)
        if not lenient:
            check_names(where, *(own_names(model, dict.fromkeys(info[k])) for k in ("missing_keys", "unexpected_keys")))
        check_finite(where, model)
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Compare the headers of the weights with the model while it still is on the meta device: nothing is allocated yet."""
        found = None
        if state_dict is not None:
            found = {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in state_dict.items()}
        elif checkpoint_files and all(str(file).endswith(".safetensors") for file in checkpoint_files):
            found = read_shapes(checkpoint_files)
            name = load_config.pretrained_model_name_or_path
            if name is not None and os.path.isdir(name):
                check_inside(Path(name), checkpoint_files)
        if found is not None and not load_config.is_quantized and not load_config.ignore_mismatched_sizes:
            where = str(load_config.pretrained_model_name_or_path or "state_dict")
            check_shapes(where, expected_shapes(model), own_names(model, found), ALLOW_MISSING.get())
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @torch.no_grad()
    @initialization.guard_torch_init_functions()
    def initialize_weights(self) -> None:
        """Children before their parents, so that a module of ours has the last word on the linear maps inside it. transformers'
        own walk leaves out modules without parameters of their own, such as the memory's gates."""
        for module in reversed(list(self.modules())):
            loaded = [getattr(x, "_is_hf_initialized", False) for x in (*module.parameters(), *module.buffers())]
            if not getattr(module, "_is_hf_initialized", False) and not (loaded and all(loaded)):
                self._init_weights(module)
            module._is_hf_initialized = True  # ty: ignore[invalid-assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # ty: ignore[not-callable]


class MnemosModel(MnemosPreTrainedModel):
    """Embedding, blocks, norm: token ids (B, T) -> hidden states (B, T, D).

    >>> model = MnemosModel(MnemosConfig(hidden_size=32, num_hidden_layers=2, layers="lmm", memory_heads=2))
    >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 32])
    """

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        config.validate_choices()
        N = config.num_persistent_tokens
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.persistent = nn.Parameter(torch.empty(N, config.hidden_size)) if N else None
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.decoder: Decoder | None = None
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the persistent tokens again."""
        if self.persistent is not None:
            nn.init.normal_(self.persistent, std=self.config.initializer_range)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MnemosCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """See `MnemosForCausalLM.forward` for the arguments."""
        hidden, rows, cache, states = self.run(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            cu_seqlens,
            output_hidden_states,
        )
        if rows is not None:
            hidden = rows.restore(hidden)
        outputs: dict[str, Any] = {"last_hidden_state": hidden, "past_key_values": cache, "hidden_states": states}
        return BaseModelOutputWithPast(**outputs)

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MnemosCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> tuple[Tensor, Rows | None, MnemosCache | None, tuple[Tensor, ...] | None]:
        """Hidden states as rows (R, L, D), how to restore the layout (None: it is (B, T)), the cache, every layer's states."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if attention_mask is not None or position_ids is not None:
            check_tensors(attention_mask=attention_mask, position_ids=position_ids)
        if inputs_embeds is not None:
            check_embeds(inputs_embeds, self.embed_tokens.weight)
        cache, use_cache = self._check_cache(past_key_values, use_cache)
        x = embed(self.embed_tokens, input_ids) if inputs_embeds is None else inputs_embeds  # ty: ignore[invalid-argument-type]
        if x.dim() != 3 or not x.numel():
            given = ("input_ids", "(B, T)") if inputs_embeds is None else ("inputs_embeds", "(B, T, D)")
            dims = x.dim() - (inputs_embeds is None)
            wrong = f"{dims} dimensions, but {given[1]} is" if x.dim() != 3 else "no token, but at least one is"
            raise ValueError(f"{given[0]} has {wrong} expected")
        rows = self._rows(x, attention_mask, position_ids, cache, cu_seqlens)
        columns = x.shape[1]
        mask = None
        if rows is not None:
            x, columns = rows.take(x), max(rows.layout[1] if cu_seqlens is None else 0, rows.mask.shape[1])
            mask = rows.mask if use_cache or cache is not None else None  # else causality protects what is valid
        persistent = 0
        if cache is None:
            x, mask, persistent = self._with_persistent(x, mask)
        elif cache.batch != x.shape[0]:
            if x.shape[0] % cache.batch:
                raise ValueError(
                    f"the cache has {cache.batch} rows, but the input has {x.shape[0]}; see cache.select and cache.fork"
                )
            cache = cache.fork(x.shape[0] // cache.batch)
        inplace = cache is not None and cache.inplace and use_cache and not torch.is_grad_enabled()
        if cache is not None and inplace:
            cache = cache.with_inplace(True)
        states, kept = [], [x[:, persistent:]]
        one_token = x.shape[1] == 1 and mask is None and use_cache and not output_hidden_states
        if self.decoder is not None and cache is not None and one_token and not torch.is_grad_enabled():
            x, states = self.decoder(x, (cache if inplace else cache.clone().with_inplace(True)).layers)
            inplace = True
        else:
            for i, block in enumerate(self.layers):
                x, state = block(x, None if cache is None else cache.layers[i], mask, persistent, use_cache)
                states.append(state)
                if output_hidden_states:
                    kept.append(x[:, persistent:])
        x = self.norm(x[:, persistent:])
        new = MnemosCache(self.config, states, columns + (0 if cache is None else cache.length)) if use_cache else None
        if new is not None and inplace:
            new = new.with_inplace(False)
        if not output_hidden_states:
            return x, rows, new, None
        kept[-1] = x
        return x, rows, new, tuple(kept if rows is None else (rows.restore(h) for h in kept))

    def _check_cache(self, cache: MnemosCache | None, use_cache: bool | None) -> tuple[MnemosCache | None, bool]:
        if cache is not None:
            if not isinstance(cache, MnemosCache):
                raise ValueError(
                    f"past_key_values is a {type(cache).__name__}, but must be a MnemosCache, as an earlier call returned it"
                )
            cache.check_config(self.config)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and self.training and self.is_gradient_checkpointing and torch.is_grad_enabled():
            use_cache = False  # without gradients nothing is run again, and `generate` counts on its cache
        return cache, bool(use_cache)

    def _rows(self, x, attention_mask, position_ids, cache, cu_seqlens) -> Rows | None:
        shape, mask = tuple(x.shape[:2]), None
        if attention_mask is not None:
            check_mask(attention_mask, shape, 0 if cache is None else cache.length)
            mask = attention_mask[:, -shape[1] :].to(device=x.device, dtype=torch.bool)
        if cu_seqlens is not None:
            return rows_of(mask, starts_from_lengths(cu_seqlens, shape).to(x.device))
        starts = None if position_ids is None else starts_from_positions(position_ids, mask, shape)
        if starts is not None and cache is not None:
            raise ValueError(
                "position_ids begin again at 0 inside a row, which goes with a fresh start only, not with past_key_values"
            )
        return rows_of(mask, starts)

    def _with_persistent(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
        if self.persistent is None:
            return x, mask, 0
        N = len(self.persistent)
        x = torch.cat([self.persistent.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        if mask is not None:
            mask = torch.cat([mask.new_ones(mask.shape[0], N), mask], dim=1)
        return x, mask, N


class MnemosForCausalLM(MnemosPreTrainedModel, CheckedInputs, GenerationMixin):
    """A language model of the family.

    >>> from mnemos.models import presets
    >>> model = MnemosForCausalLM(presets.config("titans-lmm", size="nano"))
    >>> ids = torch.tensor([list(b"hello")])
    >>> model(ids, labels=ids).loss.item() < 6
    True
    >>> model.generate(ids, max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 8])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.model = MnemosModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MnemosCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        return_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) of the next token, and the loss where labels are given.

        input_ids: (B, T), or inputs_embeds (B, T, D). attention_mask: (B, T), 0 for padding, wherever it is; or
        (B, past + T), whose columns of the past are ignored. past_key_values: go on from what an earlier call returned, which stays as it is.
        cu_seqlens: [0, end of document 1, ..., T] of documents packed in one row; position_ids that begin again at 0 say the same.
        labels: (B, T), shifted inside, -100 is ignored; the loss needs no logits, and none are returned while training
        (`return_logits` decides otherwise). logits_to_keep: how many columns, from the right (0: all), or which.
        """
        hidden, rows, cache, states = self.model.run(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            cu_seqlens,
            output_hidden_states,
        )
        loss = None
        if labels is not None:
            shape = tuple(hidden.shape[:2]) if rows is None else rows.layout
            check_labels(labels, shape, self.lm_head.weight.shape[0])
            loss = self._loss(hidden, labels if rows is None else rows.take(labels), rows, num_items_in_batch)
        logits = None
        if return_logits or (return_logits is None and not (self.training and labels is not None)):
            if rows is not None:
                hidden = rows.restore(hidden)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        outputs: dict[str, Any] = {"loss": loss, "logits": logits, "past_key_values": cache, "hidden_states": states}
        return CausalLMOutputWithPast(**outputs)

    def _loss(self, hidden: Tensor, labels: Tensor, rows: Rows | None, items: int | Tensor | None) -> Tensor:
        """Each token predicts its row's next one; no document predicts another's."""
        if rows is not None:
            labels = labels.masked_fill(~rows.mask, IGNORED)
        targets = labels[:, 1:].to(hidden.device)
        total, count = cross_entropy(hidden[:, :-1].flatten(0, 1), self.lm_head.weight, targets.flatten())
        return total / (count.clamp(min=1) if items is None else items)

    @torch.no_grad()
    def state(
        self, input_ids: Tensor, past_key_values: MnemosCache | None = None, attention_mask: Tensor | None = None
    ) -> MnemosCache:
        """Read tokens (B, T) and return what is known after them: save it, fork it, go on from it with `generate`.

        >>> model = MnemosForCausalLM(MnemosConfig(hidden_size=32, num_hidden_layers=1, layers="lmm", memory_heads=2))
        >>> cache = model.state(torch.tensor([list(b"a long document")]))
        >>> answer = model.generate(torch.tensor([list(b"?")]), past_key_values=cache, max_new_tokens=2, do_sample=False)
        """
        cache = self.model.run(input_ids, attention_mask, past_key_values=past_key_values, use_cache=True)[2]
        assert cache is not None
        return cache

    def compile_decoding(self, **options) -> None:
        """Compile the step of one token (`options` go to torch.compile): half a minute at the first tokens, faster from then on.
        Prompts, padded batches and training are run as before; so is `mac`, which looks at the numbers."""
        self.model.decoder = Decoder(self.model.layers, **options)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config=None,
        logits_processor=None,
        stopping_criteria=None,
        *args,
        **kwargs,
    ):
        """transformers' `generate`. With `past_key_values`, the input (B, T) holds the new tokens alone, always; an attention_mask
        has their columns (B, T), or those of the past too (B, past + T). Any other mask is refused.

        The cache of the output (return_dict_in_generate=True) has not read the last token, nor does it leave out the padding of
        rows that ended early: `state_after(outputs)` has read exactly the tokens of `outputs.sequences`.
        """
        cache = kwargs.get("past_key_values")
        if isinstance(cache, MnemosCache):
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
        """The state after exactly the tokens of `outputs.sequences`, row by row: padding behind a row's end is not read.

        outputs: from `generate(..., return_dict_in_generate=True)`. Where no row was padded, one token is read; else, and after
        beam search, the rows are read again from the past they began with.

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
                f"outputs is a {type(outputs).__name__}, but must be what generate(..., return_dict_in_generate=True) returned"
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
            cache = self.model.run(read.get("input_ids"), mask, None, cache, read.get("inputs_embeds"), use_cache=True)[
                2
            ]
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
        """Before the first step, every token of the input is new. A cache that `generate` got from its own last call has no other
        owner, and may be written into."""
        if isinstance(past_key_values, MnemosCache):
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
        """The mask of an input that came without one, as long as transformers expects it beside a cache."""
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get("past_key_values")
        return with_past(mask, cache.length) if isinstance(cache, MnemosCache) else mask

    def _get_stopping_criteria(self, *args, **kwargs) -> StoppingCriteriaList:
        return recorded(super()._get_stopping_criteria(*args, **kwargs))  # ty: ignore[invalid-argument-type]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
