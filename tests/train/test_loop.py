"""One loop for trainer, trials and demo: each gives the bits of a plain loop that is written out here."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from mnemos.data import open_data
from mnemos.demo import training as demo
from mnemos.demo.facts import VOCABULARY, lesson
from mnemos.memory.validation import NotFiniteError
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train import OptimConfig, Trainer
from mnemos.train.config import ScheduleConfig
from mnemos.train.loop import BatchLoss, Loop, Outcome
from mnemos.train.losses import predicted_tokens
from mnemos.train.optimisers import Optimisers
from mnemos.train.randomness import seed_everything
from mnemos.train.schedules import lr_factor
from mnemos.trials import TrialConfig, train
from small import losses, small

PRESETS = ("titans-mag", "atlas", "swa")


def small_model(preset: str, vocab_size: int = 64) -> MnemosForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": vocab_size}
    return MnemosForCausalLM(presets.config(preset, "nano", **shape))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_gives_the_bits_of_a_plain_loop(tmp_path, preset, accumulate):
    config = small(tmp_path, steps=4, accumulate=accumulate, model={"preset": preset})
    trainer = Trainer(config)
    trainer.train()
    data = open_data(config.data, seed=config.seed)
    batches = iter(data.train)
    seed_everything(config.seed)
    model = MnemosForCausalLM(trainer.model.config).train()
    optimisers, found = Optimisers(model, config.optim), {}
    seed_everything(config.seed)
    for step in range(4):
        together = [next(batches) for _ in range(accumulate)]
        items = float(sum(map(predicted_tokens, together)))
        total = 0.0
        for batch in together:
            inputs = {key: batch[key] for key in ("input_ids", "labels", "position_ids") if key in batch}
            loss = model(**inputs, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimisers.set_factor(lr_factor(config.schedule, step, 4))
        optimisers.step()
        optimisers.zero_grad()
        found[step + 1] = float(total)
    assert losses(trainer.path) == found
    assert same_weights(model, trainer.model)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_trial_gives_the_bits_of_a_plain_loop(preset):
    def batch(step):
        ids = torch.from_numpy(np.random.default_rng(step).integers(64, size=(2, 24)))
        return ids, ids

    ours, model = small_model(preset), small_model(preset).train()
    found = train(ours, TrialConfig(5, 1e-2, batch, clip=0.5))
    optimisers = Optimisers(model, OptimConfig(lr=1e-2))
    for step in range(5):
        ids, labels = batch(step)
        optimisers.set_factor(lr_factor(ScheduleConfig(), step, 5))
        loss = model(ids, labels=labels).loss
        optimisers.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimisers.step()
    assert found["train_loss"] == loss.item() and found["bad_steps"] == 0
    assert same_weights(ours, model) and not ours.training


def test_the_demo_gives_the_bits_of_a_plain_loop():
    """The gap grows from step 20 and reaches its longest at once; with a goal of 0 the learning rate falls from then on."""
    curriculum = demo.Curriculum(rows=2, pairs=2, longest=7, ready=0.0, goal=0.0, growth=1.2)
    text = np.random.default_rng(0).integers(256, size=5000).astype(np.uint8)
    ours, model = small_model("deltanet", VOCABULARY), small_model("deltanet", VOCABULARY).train()
    curve = demo.train(ours, text, curriculum, seconds=1e9)
    assert curve.grew_at == demo.RECALL_WINDOW_STEPS and curve.reached and curve.steps > demo.RECALL_WINDOW_STEPS
    falling = demo.RECALL_WINDOW_STEPS + 1
    assert curve.steps == math.ceil(falling / (1 - demo.FINISH))
    rng, optimisers = (
        np.random.default_rng(curriculum.seed),
        Optimisers(model, OptimConfig(lr=curriculum.lr, weight_decay=0.01)),
    )
    recalls, text_losses = [], []
    for step in range(curve.steps):
        factor = min(1.0, (step + 1) / demo.WARMUP)
        if step >= falling:
            factor *= 0.05 + 0.95 * (1 - (step - falling) / (curve.steps - falling))
        optimisers.set_factor(factor)
        longest = min(curriculum.longest, curriculum.gap[1] + max(0, step - demo.RECALL_WINDOW_STEPS))
        pairs = int(rng.integers(2, curriculum.pairs + 1))
        gap = round(math.exp(rng.uniform(math.log(curriculum.gap[0]), math.log(longest))))
        made = lesson(text, curriculum.rows, pairs, gap, rng)
        logits = model(made.ids, use_cache=False).logits[:, :-1]
        parts = []
        for chosen in (made.of_answer[:, 1:], made.of_text[:, 1:]):
            parts.append((logits[chosen], made.ids[:, 1:][chosen]))
        (answers, right), (others, following) = parts
        text_loss = nn.functional.cross_entropy(others, following)
        optimisers.zero_grad()
        (nn.functional.cross_entropy(answers, right) + curriculum.text_weight * text_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step()
        recalls.append((answers.argmax(-1) == right).float().mean().item())
        text_losses.append(text_loss.item())
    assert curve.recall == recalls and curve.text_loss == text_losses
    assert same_weights(ours, model) and not ours.training


# ---- the loop by itself


def line(**hooks) -> tuple[nn.Linear, list[tuple[int, Outcome]], Loop]:
    """A loop that fits a linear map to zero; what its progress hook saw."""
    torch.manual_seed(0)
    model, seen = nn.Linear(2, 1), []

    def loss(x):
        error = model(x).square().mean()
        return BatchLoss(error, error.detach())

    hooks = {"batches": lambda step: [torch.ones(1, 2)], "loss": loss} | hooks
    progress = lambda step, outcome: seen.append((step, outcome))  # noqa: E731
    return model, seen, Loop(Optimisers(model, OptimConfig(lr=0.1)), progress=progress, **hooks)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_without_a_finite_loss_leaves_the_weights_as_they_are(value):
    model, seen, loop = line(batches=lambda step: [torch.full((1, 2), value if step == 1 else 1.0)])
    weights = []
    progress = loop.progress
    loop.progress = lambda step, outcome: (progress(step, outcome), weights.append(model.weight.detach().clone()))
    loop.run(range(3))
    assert [outcome.verdict for _, outcome in seen] == ["good", "skip", "good"]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_a_memory_that_rejects_its_input_skips_the_step_and_other_errors_pass():
    told = []

    def loss(batch):
        raise batch

    errors = [NotFiniteError("gates.lr is nan"), ValueError("gates.lr has shape (1,), not nan")]
    _, seen, loop = line(batches=lambda step: [errors[step]], loss=loss, on_not_finite=told.append)
    loop.run([0])
    assert told == errors[:1] and seen[0][1].verdict == "skip" and math.isnan(seen[0][1].loss)
    with pytest.raises(ValueError, match="has shape"):
        loop.run([1])


def test_a_step_without_batches_is_skipped():
    _, seen, loop = line(batches=lambda step: [])
    loop.run(range(2))
    assert [(step, outcome.verdict) for step, outcome in seen] == [(0, "skip"), (1, "skip")]


def test_gradients_from_before_the_loop_do_not_count():
    one, _, loop = line()
    other, _, disturbed = line()
    other(torch.full((1, 2), 9.0)).sum().backward()
    loop.run(range(2))
    disturbed.run(range(2))
    assert same_weights(one, other) and all(p.grad is None for p in other.parameters())


def test_the_end_of_the_steps_is_the_stop_rule_and_a_step_may_come_again():
    _, seen, loop = line()

    def steps():
        yield from (0, 1, 0)
        while seen[-1][1].loss > seen[0][1].loss / 2:
            yield seen[-1][0] + 1

    loop.run(steps())
    assert [step for step, _ in seen[:3]] == [0, 1, 0] and seen[-1][1].loss <= seen[0][1].loss / 2


def test_the_judge_decides_and_the_last_batch_of_a_step_is_marked():
    marked = []

    def syncing(last):
        marked.append(last)
        return contextlib.nullcontext()

    model, seen, loop = line(
        batches=lambda step: [torch.ones(1, 2)] * 3, judge=lambda outcome: "back", syncing=syncing, clip=0.0
    )
    before = model.weight.detach().clone()
    loop.run([0])
    assert marked == [False, False, True] and seen[0][1].verdict == "back" and torch.equal(before, model.weight)
    assert seen[0][1].loss == pytest.approx(3 * model(torch.ones(1, 2)).square().item())
