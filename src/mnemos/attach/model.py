"""`AttachedForCausalLM`: a pretrained causal language model with memories beside the attention of chosen layers.

Shapes: B batch, T time, V vocabulary; P columns in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..memory.state_validation import MAX_POSITION
from ..models.generation import check_mask
from ..models.row_layout import row_layout, starts_from_cu_seqlens, starts_from_position_ids
from .architectures import attention_modules, check_base, decoder_layers, sliding_windows
from .cache import AttachedCache
from .call import KEYWORD, AttachedCall
from .config import AttachConfig
from .control import MemoryControl
from .generation import AttachedGenerationMixin
from .memory import AttachedMemory, take_source
from .pretrained import AttachedPreTrainedModel
from .transformers_config import AttachedModelConfig
from .window import limits, use_window


def attach(model: PreTrainedModel, config: AttachConfig | None = None, **fields) -> AttachedForCausalLM:
    """Attach memories to a pretrained causal language model. Its logits do not change until the memories are trained.

    model: a causal language model of transformers. Its weights are frozen and stay as they are; the model itself becomes
    `attached.base`. config: an `AttachConfig`, or its fields as keywords.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    >>> base = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> before = base(ids).logits
    >>> model = attach(base, layers=[1], memory="titans")
    >>> torch.equal(model(ids).logits, before), [name for name, p in model.named_parameters() if p.requires_grad][0]
    (True, 'memories.1.gate')
    """
    if config is not None and fields:
        raise ValueError("give an AttachConfig, or its fields as keywords, not both")
    config = AttachConfig.from_dict(fields) if config is None else config
    if not isinstance(config, AttachConfig):
        raise ValueError(f"config is a {type(config).__name__}, but must be an AttachConfig")
    if isinstance(model, AttachedForCausalLM):
        raise ValueError("the model has memories already: attach to model.base of a newly opened one")
    check_base(model, config)
    for module in model.modules():
        module._is_hf_initialized = True  # ty: ignore[invalid-assignment] — transformers draws no weights again
    whole = AttachedModelConfig(base_config=model.config, attach=config.to_dict())
    return AttachedForCausalLM(whole, base=model).train(model.training)


class AttachedForCausalLM(AttachedPreTrainedModel, AttachedGenerationMixin):
    """A pretrained model, `base`, with memories: h + attention(h) + gate · memory(h) in chosen layers. Made by `attach`.

    memory: switches at inference, see `MemoryControl`. memories: the memory of each layer, by the layer's index.
    Where the layers of a base have a norm behind attention (Gemma 2 and 3, OLMo 2), the memory is added in front of it.
    Calling `base` alone computes the base model, without memories and with full attention.
    """

    def __init__(self, config: AttachedModelConfig, base: PreTrainedModel | None = None):
        super().__init__(config)
        chosen = config.attach_config
        self.base = AutoModelForCausalLM.from_config(config.base_config) if base is None else base
        self.memory = MemoryControl()
        self.lora: dict[str, Any] | None = None  # options of LoRA maps in the base, see lora.py
        check_base(self.base, chosen)
        modules = attention_modules(self.base, chosen.target)
        memory = chosen.memory_config(self.base.config.hidden_size)
        self.limits: list[tuple[int, int, int | None]] | None = None
        if chosen.window is not None:
            own = sliding_windows(self.base.config)
            self.limits = [limits(chosen.window, chosen.sinks, width) for width in own]
            self.set_attn_implementation(self.base.config._attn_implementation)
        self.memories = nn.ModuleDict()
        if chosen.source is not None:
            modules[chosen.source].register_forward_pre_hook(take_source, with_kwargs=True)
        for i in chosen.layer_indices(len(modules)):
            like = next(modules[i].parameters())
            kind = torch.promote_types(like.dtype, torch.float32)
            added = AttachedMemory(memory, i).to(device=like.device, dtype=kind)
            self.memories[str(i)] = added
            modules[i].register_forward_hook(added.hook, with_kwargs=True)
        self.base.requires_grad_(False)
        self.generation_config = self.base.generation_config
        self.post_init()

    @property
    def attach_config(self) -> AttachConfig:
        """How the memories are attached."""
        return self.config.attach_config

    def decoder_layers(self) -> list[nn.Module]:
        """The layers of the base, in order."""
        return decoder_layers(self.base, self.attach_config.target)

    def memory_modules(self) -> dict[int, nn.Module]:
        """Memory modules by layer index."""
        return {int(i): added.memory for i, added in self.memories.items()}  # ty: ignore[invalid-explicit-return]

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """transformers' function; with a window, attention is computed in blocks by this implementation."""
        if self.limits is None:
            self.base.set_attn_implementation(attn_implementation, *args, **kwargs)
        elif not isinstance(attn_implementation, str):
            raise ValueError("attn_implementation must be one name for all layers of a model with a window")
        else:
            self.base.set_attn_implementation(use_window(attn_implementation))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AttachedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        return_logits: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) of the next token, and the loss if labels are given.

        input_ids: (B, T), or inputs_embeds (B, T, D). attention_mask: (B, T), 0 for padding; or (B, P + T), whose P columns of the
        cache are ignored. past_key_values: the cache of an earlier call, which this call changes. cu_seqlens: [0, end of document 1,
        ..., T] of documents packed in one row; position_ids that restart at 0 have the same effect. labels: (B, T), shifted inside,
        -100 is ignored. num_items_in_batch: divides the summed loss, instead of the number of labels. return_logits: False leaves them out
        of the result.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or not isinstance(given, Tensor) or given.dim() < 2 or 0 in given.shape:
            raise ValueError("give input_ids (B, T) or inputs_embeds (B, T, D) with at least one token")
        cache, use_cache = self._cache(past_key_values, use_cache, given.shape[0])
        call, mask = self._call(given, attention_mask, position_ids, cache, cu_seqlens)
        inputs: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "past_key_values": cache}
        inputs |= {"use_cache": use_cache, "logits_to_keep": logits_to_keep, KEYWORD: call}
        inputs |= self._attention_inputs(call, mask, position_ids, cache, given.device)
        try:
            if cache is not None:
                cache.call = call
            found = self.base(**inputs, **kwargs)
        finally:
            if cache is not None:
                cache.call = None
        self._check_reached(call)
        if cache is not None:
            cache.advance(call, mask, given.device)
        loss = None
        if labels is not None:
            labels = call.targets(labels)
            options = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(found.logits, labels, found.logits.shape[-1], **options)
        outputs: dict[str, Any] = {"loss": loss, "logits": None if return_logits is False else found.logits}
        outputs["past_key_values"] = cache if use_cache else None
        outputs |= {"hidden_states": found.hidden_states, "attentions": found.attentions}
        return CausalLMOutputWithPast(**outputs)

    def new_cache(self) -> AttachedCache:
        """An empty cache for this model."""
        return AttachedCache(self.base.config, self.limits, self.memory.epoch)

    def _cache(self, cache: Any, use_cache: bool | None, rows: int) -> tuple[AttachedCache | None, bool]:
        if use_cache is None:
            use_cache = bool(getattr(self.base.config, "use_cache", True)) and not self.training
        if self.training and torch.is_grad_enabled() and self._recomputes_layers():
            if cache is not None:
                raise ValueError("gradient checkpointing computes layers twice and goes without past_key_values")
            use_cache = False
        if cache is None:
            return (self.new_cache() if use_cache else None), use_cache
        if not isinstance(cache, AttachedCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}, but must be an AttachedCache: model.new_cache(), or that of an earlier call"
            )
        if len(cache.layers) != self.base.config.num_hidden_layers or cache.is_windowed != (self.limits is not None):
            raise ValueError("past_key_values belongs to another model: begin with model.new_cache()")
        if cache.batch and cache.batch != rows:
            if rows % cache.batch:
                raise ValueError(
                    f"the cache has {cache.batch} rows, but the input has {rows}; see cache.select and cache.fork"
                )
            cache.batch_repeat_interleave(rows // cache.batch)
        if cache.epoch != self.memory.epoch:
            cache.reset_memory()
            cache.epoch = self.memory.epoch
        return cache, use_cache

    def _recomputes_layers(self) -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in self.base.modules())

    def _call(self, x: Tensor, attention_mask, position_ids, cache, cu_seqlens) -> tuple[AttachedCall, Tensor | None]:
        """The call, and the valid ones of its tokens (B, T); None: all."""
        shape = (x.shape[0], x.shape[1])
        mask, starts = None, None
        if attention_mask is not None:
            check_mask(attention_mask, shape, 0 if cache is None else cache.length)
            mask = attention_mask[:, -shape[1] :].to(device=x.device, dtype=torch.bool)
        if cu_seqlens is not None:
            starts = starts_from_cu_seqlens(cu_seqlens, shape).to(x.device)
        elif position_ids is not None and shape[1] > 1 and not torch.compiler.is_compiling():
            starts = starts_from_position_ids(position_ids, mask, shape)
        if starts is not None and cache is not None:
            if cache.length:
                raise ValueError("packed documents go with a fresh start only, not with past_key_values")
            raise ValueError("packed documents have no common cache: use_cache=False")
        layout = row_layout(mask, starts)
        start = None if cache is None else cache.position
        if cache is not None and start is None:
            start = torch.zeros(shape[0], dtype=torch.int64, device=x.device)
        if cache is not None and cache.length + shape[1] > MAX_POSITION:
            raise ValueError(f"the cache has read {cache.length} tokens, and the limit is {MAX_POSITION}")
        switches = self.memory.switches
        call = AttachedCall(shape, layout, start, cache, self.limits, switches, packed=starts is not None)
        return call, None if layout is None else mask

    def _attention_inputs(self, call: AttachedCall, mask, position_ids, cache, device) -> dict[str, Any]:
        """attention_mask and position_ids of the base model."""
        if self.limits is not None:
            # a mask of four axes is used as it is: here, not at all
            unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
            return {"attention_mask": unused, "position_ids": call.positions(device)}
        if call.packed:  # the base tells documents apart by their positions
            call.check_documents()
            return {"attention_mask": None, "position_ids": call.positions(device)}
        past = None if cache is None else cache.mask
        if past is not None or mask is not None:
            rows, columns = call.shape
            old = torch.ones(rows, 0 if cache is None else cache.length, dtype=torch.bool, device=device)
            new = torch.ones(rows, columns, dtype=torch.bool, device=device) if mask is None else mask
            mask = torch.cat([old if past is None else past, new], dim=1)
        return {"attention_mask": mask, "position_ids": position_ids}

    def _check_reached(self, call: AttachedCall) -> None:
        if len(call.reached) != len(self.memories):
            raise ValueError(
                f"{len(self.memories) - len(call.reached)} memories were not reached: {type(self.base).__name__} does not pass keywords on "
                "to its attention, or torch.compile left out their hooks (torch._dynamo.config.skip_nnmodule_hook_guards = False)"
            )
