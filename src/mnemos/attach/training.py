"""Training of attached memories: parameter groups, and distillation from the base model with its full context.

The functions are plain: they fit transformers' Trainer (`optimizers=`, `compute_loss_func=`) and a loop of your own.
Shapes: B batch, T time, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.loss import IGNORED
from .lora import without_lora
from .model import AttachedForCausalLM


def parameter_groups(
    model: AttachedForCausalLM, lr: float = 1e-3, weight_decay: float = 0.1, gate_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for an optimiser: gates, which have their own rate and no decay; other vectors, without decay; matrices.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from mnemos.attach import attach
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    >>> model = attach(LlamaForCausalLM(LlamaConfig(**sizes)), layers=[1])
    >>> optimiser = torch.optim.AdamW(parameter_groups(model, lr=1e-3))
    >>> [(group["name"], len(group["params"])) for group in optimiser.param_groups][0]
    ('gates', 1)
    """
    gates = {id(memory.gate) for memory in model.memories.values()}
    groups: dict[str, list] = {"gates": [], "vectors": [], "matrices": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "gates" if id(parameter) in gates else "vectors" if parameter.dim() < 2 else "matrices"
            groups[kind].append(parameter)
    rates = {"gates": lr * gate_lr_scale}
    return [
        {"name": name, "params": found, "lr": rates.get(name, lr), "weight_decay": weight_decay * (name == "matrices")}
        for name, found in groups.items()
        if found
    ]


def warmup_lambdas(optimiser: torch.optim.Optimizer, warmup: int, gate_warmup: int) -> list[Callable[[int], float]]:
    """Factors of the learning rates for `torch.optim.lr_scheduler.LambdaLR`: linear warm-up, with a length of its own for gates.

    While gates are near zero, a memory is trained by small gradients and disturbs the base little.
    """
    lengths = [gate_warmup if group.get("name") == "gates" else warmup for group in optimiser.param_groups]
    return [lambda step, n=n: min(1.0, (step + 1) / max(1, n)) for n in lengths]


@dataclass
class Teacher:
    """The base model's outputs with its full context. logits: (B, T, V). hidden_states: (B, T, D) of each layer, or None."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


@torch.no_grad()
def teach(model: AttachedForCausalLM, input_ids: Tensor, hidden_states: bool = False, **inputs) -> Teacher:
    """The outputs of `model.base`, without memories and LoRA maps and with full attention, for `distillation_loss`. No second model is needed."""
    is_training = model.base.training
    model.base.eval()
    try:
        with without_lora(model):
            found = model.base(input_ids, use_cache=False, output_hidden_states=hidden_states, **inputs)
    finally:
        model.base.train(is_training)
    return Teacher(found.logits, found.hidden_states)


def distillation_loss(
    outputs: Any,
    teacher: Teacher,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    logits_weight: float = 1.0,
    hidden_weight: float = 0.0,
) -> Tensor:
    """KL divergence of the teacher's next-token distributions from the student's, plus the relative error of its hidden states.

    outputs: of the attached model, called with output_hidden_states=True if hidden_weight > 0. mask: (B, T), the tokens that count.
    The mean is over these tokens. The error of hidden states is |student - teacher|² / |teacher|², a mean over layers.
    """
    keep = torch.ones(teacher.logits.shape[:2], device=teacher.logits.device) if mask is None else mask.float()
    count = keep.sum().clamp(min=1)
    loss = outputs.logits.new_zeros((), dtype=torch.float32)
    if logits_weight:
        student = F.log_softmax(outputs.logits.float() / temperature, dim=-1)
        target = F.log_softmax(teacher.logits.float() / temperature, dim=-1)
        divergence = F.kl_div(student, target, log_target=True, reduction="none").sum(-1)  # B T
        loss = loss + logits_weight * temperature**2 * (divergence * keep).sum() / count
    if hidden_weight:
        if outputs.hidden_states is None or teacher.hidden_states is None:
            raise ValueError(
                "hidden_weight > 0 needs output_hidden_states=True of the model and hidden_states=True of teach"
            )
        errors = [
            ((a.float() - b.float()).square().sum(-1) / b.float().square().sum(-1).clamp(min=1e-6) * keep).sum() / count
            for a, b in zip(outputs.hidden_states[1:], teacher.hidden_states[1:])
        ]
        loss = loss + hidden_weight * torch.stack(errors).mean()
    return loss


def distillation_step(
    model: AttachedForCausalLM, inputs: dict[str, Any], label_weight: float = 0.0, **weights
) -> tuple[Tensor, Any]:
    """The loss of one batch, and the outputs of the model: distillation from its own base, plus `label_weight` times the loss of labels.

    inputs: keywords of the model's call, such as input_ids, attention_mask and labels; weights: those of `distillation_loss`.
    For transformers' Trainer, a subclass whose compute_loss returns this function's result is enough.
    """
    inputs = dict(inputs)
    labels = inputs.pop("labels", None)
    hidden = bool(weights.get("hidden_weight"))
    teacher = teach(model, **inputs, hidden_states=hidden)
    outputs = model(**inputs, labels=labels if label_weight else None, use_cache=False, output_hidden_states=hidden)
    mask = inputs.get("attention_mask")
    if mask is None and labels is not None:
        mask = labels != IGNORED
    loss = distillation_loss(outputs, teacher, mask, **weights)
    return (loss + label_weight * outputs.loss if label_weight else loss), outputs
