"""Training: distillation from the base with its full context, transformers' Trainer, and torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import attached, left_padded, tokens
from transformers import Trainer, TrainingArguments

from helpers import assert_close
from mnemos.attach import distillation_step, parameter_groups, teach, warmup_lambdas
from mnemos.attach.identity import base_hash

WINDOWED = {"window": 6, "sinks": 2}


def test_distillation_from_the_own_base_lowers_its_loss():
    model, ids = attached(trained=False, **WINDOWED).train(), tokens(2, 24)
    optimiser = torch.optim.AdamW(parameter_groups(model, lr=1e-2, gate_lr_scale=5.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, warmup_lambdas(optimiser, 2, 4))
    rates, losses = [], []
    for _ in range(8):
        loss, _ = distillation_step(model, {"input_ids": ids, "labels": ids}, hidden_weight=1.0, label_weight=0.1)
        loss.backward()
        rates.append([group["lr"] for group in optimiser.param_groups])
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert rates[0] == pytest.approx([0.05 / 4, 0.01 / 2, 0.01 / 2]) and rates[-1] == pytest.approx([0.05, 0.01, 0.01])


def test_a_windowed_student_inside_its_window_has_nothing_to_learn():
    model = attached(trained=False, window=30)
    loss, _ = distillation_step(model, {"input_ids": tokens(2, 20)}, hidden_weight=1.0)
    assert abs(loss.item()) < 1e-6


@torch.no_grad()
def test_padding_does_not_count_in_distillation():
    model, ids = attached(**WINDOWED), tokens(2, 20)
    padded, mask = left_padded(ids, [0, 9])
    other = padded.masked_fill(mask == 0, 33)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    losses = [
        distillation_step(model, {"input_ids": x, "attention_mask": mask, "position_ids": positions})[0]
        for x in (padded, other)
    ]
    assert_close(losses[0], losses[1], 1e-6)
    assert teach(model, ids).hidden_states is None


def test_transformers_trainer_trains_the_memories_and_resumes(tmp_path):
    model = attached(trained=False, **WINDOWED)
    before = base_hash(model.base)
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]
    options = {"output_dir": str(tmp_path), "max_steps": 3, "save_steps": 3, "per_device_train_batch_size": 2}
    options |= {"report_to": [], "learning_rate": 1e-2, "use_cpu": True, "gradient_checkpointing": True}
    Trainer(model, TrainingArguments(**options, disable_tqdm=True, logging_strategy="no"), train_dataset=rows).train()
    assert base_hash(model.base) == before and model.memories["1"].gate.abs().max() > 0
    again = attached(trained=False, **WINDOWED)
    options["max_steps"] = 4
    trainer = Trainer(again, TrainingArguments(**options, disable_tqdm=True), train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 4 and again.memories["1"].gate.abs().max() > 0


@pytest.mark.slow
def test_a_compiled_training_step_has_the_same_gradients():
    model, ids = attached(**WINDOWED).train(), tokens(2, 24)
    other = copy.deepcopy(model)
    model(ids, labels=ids).loss.backward()
    torch.compile(other, backend="eager")(ids, labels=ids).loss.backward()
    for a, b in zip(other.memories.parameters(), model.memories.parameters()):
        assert_close(a.grad, b.grad, 1e-4)
