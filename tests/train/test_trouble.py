"""What a run does when a step goes wrong, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from mnemos.train import Trainer, TrainingFailed, load_model
from mnemos.train.checkpoints import checkpoint_steps
from mnemos.train.telemetry import read_metrics
from small import events, losses, small, state_of


def spoil(trainer: Trainer, spoilt, factor=math.nan) -> None:
    """Make the loss of some steps NaN, or larger, where the model computes it."""

    def hook(module, args, output):
        if module.training and spoilt(trainer.progress.step):
            output.loss = output.loss * factor
        return output

    trainer.model.register_forward_hook(hook)


# ---- trouble


def test_a_step_without_a_finite_loss_is_skipped_and_counted(tmp_path):
    trainer = Trainer(small(tmp_path, steps=6))
    spoil(trainer, lambda step: step in (2, 4))
    result = trainer.train()
    assert result.step == 6 and all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert "step 2: the loss or its gradient is not finite; the step is skipped (1 so far)" in events(result.path)
    found = {r["step"]: r for r in read_metrics(result.path, "train")}
    assert found[3]["loss"] is None and found[6]["bad_steps"] == 2
    assert state_of(result.path, 6)["guard"]["bad_steps"] == 2


def test_the_weights_do_not_move_in_a_skipped_step(tmp_path):
    trainer = Trainer(small(tmp_path, steps=3))
    spoil(trainer, lambda step: step == 0)
    trainer._begin()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.loop.run([trainer.progress.step])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    trainer.loop.run([trainer.progress.step])
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))


def test_repeated_nan_goes_back_to_the_last_good_checkpoint_past_the_data_that_caused_it(tmp_path):
    trainer = Trainer(small(tmp_path, steps=9, checkpoint={"every": 2, "bad_steps": 3}))
    calls = []
    spoil(
        trainer, lambda step: calls.append(step) or 5 <= len(calls) <= 7
    )  # the fifth to seventh batch, whatever the step
    result = trainer.train()
    assert result.step == 9 and trainer.progress.guard.rollbacks == 1
    assert "the loss was not finite for 3 steps in a row; rolled back to" in events(result.path)
    assert "learning rate times 0.70" in events(result.path)
    assert calls == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]  # from step 6 back to step 4
    assert all(math.isfinite(loss) for step, loss in losses(result.path).items())


def test_weights_that_become_nan_are_taken_from_the_checkpoint(tmp_path):
    """The memory itself refuses gates that are NaN, before there is a loss: that is the same trouble."""
    trainer = Trainer(small(tmp_path, steps=6, checkpoint={"every": 2}, watch={"validate_every": 1}))
    one_step, hit = trainer.loop.step, []

    def broken(step):
        if step == 3 and not hit:
            hit.append(True)
            with torch.no_grad():
                trainer.model.model.layers[0].mixer.memory.gating.offset.fill_(math.nan)
        return one_step(step)

    trainer.loop.step = broken
    result = trainer.train()
    assert result.step == 6 and trainer.progress.guard.rollbacks == 1 and math.isfinite(result.val_loss)


def test_a_run_that_diverges_goes_back(tmp_path):
    trainer = Trainer(small(tmp_path, steps=14, checkpoint={"every": 3, "spike": 0.4, "rollbacks": 1}))
    calls = []
    spoil(trainer, lambda step: calls.append(step) or 8 <= len(calls) <= 10, factor=1.6)
    result = trainer.train()
    assert "the smoothed loss rose to" in events(result.path)
    assert trainer.progress.guard.rollbacks == 1 and result.step == 14
    assert result.loss < losses(result.path)[1]


def test_a_run_that_cannot_be_saved_from_itself_ends_with_a_sentence(tmp_path):
    trainer = Trainer(small(tmp_path, steps=30, checkpoint={"every": 2, "rollbacks": 2}))
    spoil(trainer, lambda step: step >= 5)
    with pytest.raises(TrainingFailed, match="after 2 rollbacks; checkpoints are kept: try a smaller"):
        trainer.train()
    assert checkpoint_steps(tmp_path / "runs" / "a" / "checkpoints")[-1] == 4
    other = Trainer(small(tmp_path, name="b"))
    spoil(other, lambda step: True)
    with pytest.raises(TrainingFailed, match="there is no checkpoint to roll back to"):
        other.train()


def test_a_rolled_back_run_never_overwrites_its_best(tmp_path):
    trainer = Trainer(small(tmp_path, steps=8, checkpoint={"every": 2}, watch={"validate_every": 2}))
    calls = []
    spoil(trainer, lambda step: calls.append(step) or 6 <= len(calls) <= 8)
    result = trainer.train()
    assert trainer.progress.guard.rollbacks == 1
    best = min(r["val_loss"] for r in read_metrics(result.path, "validate"))
    assert trainer.checkpoints.best()["val_loss"] == best == trainer.progress.best


# ---- what is refused


def test_a_run_does_not_write_over_another(tmp_path):
    Trainer(small(tmp_path, steps=1)).train()
    with pytest.raises(ValueError, match="holds a run already: continue it with --resume"):
        Trainer(small(tmp_path, steps=1))
    config = small(tmp_path, steps=1)
    config.name = None
    assert Trainer(config).path.name == "titans-mag-nano"
    config.name = None
    assert Trainer(config).path.name == "titans-mag-nano-2"


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    config = small(tmp_path)
    config.model.set = (*config.model.set, "vocab_size=100")
    with pytest.raises(ValueError, match="vocab_size=100 is too small for the tokenizer's 256 tokens"):
        Trainer(config)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_field_of_the_model_is_named(tmp_path):
    config = small(tmp_path)
    config.model.set = ("attention_windw=3",)
    with pytest.raises(ValueError, match="did you mean attention_window"):
        Trainer(config)


def test_data_of_ones_own_goes_in_by_hand(tmp_path):
    class Endless:
        def __init__(self):
            self.count = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.count += 1
            ids = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(self.count))
            return {"input_ids": ids, "labels": ids}

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    class Tokens:
        eos_token_id, bytes_per_token = None, 1.0

        def save(self, folder):
            (folder / "words.txt").write_text("none")

    class Mine:
        def __init__(self):
            self.train, self.validation, self.tokenizer, self.vocab_size = Endless(), [], Tokens(), 50

    result = Trainer(small(tmp_path, steps=3, watch={"validate_every": 1, "probe_every": 1}), data=Mine()).train()
    assert result.step == 3 and result.val_loss is None
    assert load_model(result.path).config.vocab_size == 50
