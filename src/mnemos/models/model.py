"""The models: `MnemosModel`, tokens to hidden states, and `MnemosForCausalLM`, hidden states to logits and loss.

Shapes: B, T as given; R rows of L tokens (row_layout.py); N persistent tokens; D hidden size; V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..memory import NeuralMemory
from ..nn import QKProjection
from ..nn.linear import Linear
from ..nn.norm import RMSNorm
from .blocks import Block
from .cache import MnemosCache
from .compiled_decoder import CompiledDecoder
from .config import MnemosConfig
from .generation import MnemosGenerationMixin, check_mask
from .inputs import check_embeds, check_labels, check_tensors, embed
from .loss import IGNORED, cross_entropy
from .pretrained import MnemosPreTrainedModel
from .row_layout import RowLayout, row_layout, starts_from_cu_seqlens, starts_from_position_ids


class BackboneOutput(NamedTuple):
    """Result of `MnemosModel.run`.

    hidden: (R, L, D) after the last norm. layout: how to restore (B, T); None if the rows are those of the batch.
    hidden_states: (B, T, D) before the first block and after each, if asked for; the last is after the norm.
    """

    hidden: Tensor
    layout: RowLayout | None
    cache: MnemosCache | None
    hidden_states: tuple[Tensor, ...] | None


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
        self.compiled_decoder: CompiledDecoder | None = None
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the persistent tokens."""
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
        """Hidden states (B, T, D) after the last norm. The arguments are those of `MnemosForCausalLM.forward`."""
        found = self.run(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            cu_seqlens,
            output_hidden_states,
        )
        outputs: dict[str, Any] = {
            "last_hidden_state": found.hidden if found.layout is None else found.layout.unpack(found.hidden),
            "past_key_values": found.cache,
            "hidden_states": found.hidden_states,
        }
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
    ) -> BackboneOutput:
        """`forward` before the layout is restored: embedding, layout, persistent tokens, blocks, norm."""
        if attention_mask is not None or position_ids is not None:
            check_tensors(attention_mask=attention_mask, position_ids=position_ids)
        cache, use_cache = self._check_cache(past_key_values, use_cache)
        x = self._embed(input_ids, inputs_embeds)  # B T D
        layout = self._layout(x, attention_mask, position_ids, cache, cu_seqlens)
        columns, mask = x.shape[1], None
        if layout is not None:
            x = layout.pack(x)  # R L D
            columns = max(layout.batch_shape[1] if cu_seqlens is None else 0, x.shape[1])
            mask = layout.mask if use_cache or cache is not None else None  # without states, causality is enough
        persistent = 0
        if cache is None:
            x, mask, persistent = self._with_persistent(x, mask)
        elif cache.batch != x.shape[0]:
            cache = self._forked(cache, x.shape[0])
        inplace = cache is not None and cache.inplace and use_cache and not torch.is_grad_enabled()
        if cache is not None and inplace:
            cache = cache.with_inplace(True)
        states, kept = [], [x[:, persistent:]]
        one_token = x.shape[1] == 1 and mask is None and use_cache and not output_hidden_states
        if self.compiled_decoder is not None and cache is not None and one_token and not torch.is_grad_enabled():
            x, states = self.compiled_decoder(x, (cache if inplace else cache.clone().with_inplace(True)).layers)
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
            return BackboneOutput(x, layout, new, None)
        kept[-1] = x
        return BackboneOutput(x, layout, new, tuple(kept if layout is None else map(layout.unpack, kept)))

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
            use_cache = False  # without gradients nothing is recomputed, and `generate` needs its cache
        return cache, bool(use_cache)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """(B, T) token ids, or their embeddings -> (B, T, D)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            check_embeds(inputs_embeds, self.embed_tokens.weight)
        x = embed(self.embed_tokens, input_ids) if inputs_embeds is None else inputs_embeds  # ty: ignore[invalid-argument-type]
        if x.dim() != 3 or not x.numel():
            given = ("input_ids", "(B, T)") if inputs_embeds is None else ("inputs_embeds", "(B, T, D)")
            dims = x.dim() - (inputs_embeds is None)
            wrong = f"{dims} dimensions, but {given[1]} is" if x.dim() != 3 else "no token, but at least one is"
            raise ValueError(f"{given[0]} has {wrong} expected")
        return x

    def _layout(self, x, attention_mask, position_ids, cache, cu_seqlens) -> RowLayout | None:
        """How the valid tokens of x (B, T, D) are moved to the front of rows; None if they are there already."""
        shape, mask = tuple(x.shape[:2]), None
        if attention_mask is not None:
            check_mask(attention_mask, shape, 0 if cache is None else cache.length)
            mask = attention_mask[:, -shape[1] :].to(device=x.device, dtype=torch.bool)
        if cu_seqlens is not None:
            return row_layout(mask, starts_from_cu_seqlens(cu_seqlens, shape).to(x.device))
        starts = None if position_ids is None else starts_from_position_ids(position_ids, mask, shape)
        if starts is not None and cache is not None:
            raise ValueError(
                "position_ids begin again at 0 inside a sequence, which cannot be combined with past_key_values"
            )
        return None if mask is None and starts is None else row_layout(mask, starts)

    def _with_persistent(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
        """x (R, L, D) and mask (R, L) behind the N persistent tokens: (R, N + L, D), (R, N + L), N."""
        if self.persistent is None:
            return x, mask, 0
        N = len(self.persistent)
        x = torch.cat([self.persistent.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        if mask is not None:
            mask = torch.cat([mask.new_ones(mask.shape[0], N), mask], dim=1)
        return x, mask, N

    @staticmethod
    def _forked(cache: MnemosCache, rows: int) -> MnemosCache:
        """The cache with each row repeated, `rows` in all."""
        if rows % cache.batch:
            raise ValueError(
                f"the cache has {cache.batch} batch rows, but the input has {rows}; see cache.select and cache.fork"
            )
        return cache.fork(rows // cache.batch)


class MnemosForCausalLM(MnemosPreTrainedModel, MnemosGenerationMixin):
    """A language model: `MnemosModel` and a linear map from hidden states to logits.

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
        """Logits (B, T, V) of the next token, and the loss if labels are given.

        input_ids: (B, T), or inputs_embeds (B, T, D). attention_mask: (B, T), 0 for padding, which may be anywhere; or (B, P + T),
        whose P columns of the cache are ignored. past_key_values: the cache that an earlier call returned; it is not changed.
        cu_seqlens: [0, end of document 1, ..., T] of documents packed in one row; position_ids that restart at 0 have the same effect.
        labels: (B, T), shifted inside, -100 is ignored. The loss needs no logits; in training with labels none are returned unless
        `return_logits` is True. logits_to_keep: the number of columns, from the right (0: all), or their indices.
        num_items_in_batch: divides the summed loss, instead of the number of labels.
        """
        found = self.model.run(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            cu_seqlens,
            output_hidden_states,
        )
        hidden, layout = found.hidden, found.layout  # R L D
        loss = None
        if labels is not None:
            shape = tuple(hidden.shape[:2]) if layout is None else layout.batch_shape
            check_labels(labels, shape, self.lm_head.weight.shape[0])
            loss = self._loss(hidden, labels if layout is None else layout.pack(labels), layout, num_items_in_batch)
        logits = None
        if return_logits or (return_logits is None and not (self.training and labels is not None)):
            if layout is not None:
                hidden = layout.unpack(hidden)  # B T D
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])  # B T V
        outputs: dict[str, Any] = {
            "loss": loss,
            "logits": logits,
            "past_key_values": found.cache,
            "hidden_states": found.hidden_states,
        }
        return CausalLMOutputWithPast(**outputs)

    def decoder_layers(self) -> list[nn.Module]:
        """The blocks, in order."""
        return list(self.model.layers)

    def memory_modules(self) -> dict[int, nn.Module]:
        """Memory modules by layer index."""
        return {
            i: module
            for i, block in enumerate(self.model.layers)
            for module in block.modules()
            if isinstance(module, NeuralMemory | QKProjection)
        }

    def _loss(self, hidden: Tensor, labels: Tensor, layout: RowLayout | None, items: int | Tensor | None) -> Tensor:
        """hidden (R, L, D), labels (R, L) -> the mean loss. A row is one document, so no document predicts the next one."""
        if layout is not None:
            labels = labels.masked_fill(~layout.mask, IGNORED)
        targets = labels[:, 1:].to(hidden.device)
        total, count = cross_entropy(hidden[:, :-1].flatten(0, 1), self.lm_head.weight, targets.flatten())
        return total / (count.clamp(min=1) if items is None else items)

    def compile_decoding(self, **options) -> None:
        """Compile the decoding of one token. `options` are those of torch.compile.

        The first tokens take half a minute, later ones are faster. Prompts, padded batches and training run as before, and so does
        `mac`, whose control flow depends on tensor values.
        """
        self.model.compiled_decoder = CompiledDecoder(self.model.layers, **options)
