"""A run that is killed, stopped, or finds its checkpoints damaged goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

from mnemos.train import Trainer, load_model
from mnemos.train.checkpoints import checkpoint_steps, problem_of
from mnemos.train.randomness import random_state, seed_everything, set_random_state
from mnemos.train.telemetry import read_metrics
from small import events, losses, small, state_of

SRC = Path(__file__).parents[2] / "src"


def start(*commands: list[str]) -> subprocess.Popen:
    """A process of its own that runs `mnemos train` with these arguments, one after the other."""
    code = f"import sys; from mnemos.cli import main; sys.exit(max(main(['train', *c]) for c in {list(commands)!r}))"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SRC)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if max(losses(run), default=0) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never reached: {process.communicate()[0][-2000:]}")


def carrying(folder: Path, name: str, steps: int):
    """Everything that a step depends on: carried memory, dropped memories, an average, batches in pieces."""
    return small(
        folder,
        name=name,
        steps=steps,
        accumulate=2,
        data={"carry_state": True},
        loss={"memory_dropout": 0.3},
        optim={"ema": 0.9},
        checkpoint={"every": 3, "asynchronous": True},
    )


def test_a_run_killed_by_sigkill_has_the_losses_of_one_that_was_not_to_the_last_bit(tmp_path):
    config = carrying(tmp_path, "killed", 16)
    config.save(tmp_path / "config.yaml")
    process = start(["--config", str(tmp_path / "config.yaml"), "--name", "killed"])
    wait_for_step(tmp_path / "runs" / "killed", 6, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    run = tmp_path / "runs" / "killed"
    first = losses(run)
    assert 6 <= max(first) < 16
    others = start(["--resume", str(run)], ["--config", str(tmp_path / "config.yaml"), "--name", "unbroken"])
    output = others.communicate(timeout=200)[0]
    assert others.returncode == 0, output
    assert "resuming from" in output
    expected = losses(tmp_path / "runs" / "unbroken")
    assert len(expected) == 16
    assert losses(run) == expected
    assert {step: first[step] for step in first} == {step: expected[step] for step in first}
    weights = [load_model(tmp_path / "runs" / name, "last").state_dict() for name in ("killed", "unbroken")]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
    config = small(tmp_path, name="stopped", steps=100000, checkpoint={"every": 100000})
    config.save(tmp_path / "config.yaml")
    process = start(["--config", str(tmp_path / "config.yaml"), "--name", "stopped"])
    run = tmp_path / "runs" / "stopped"
    wait_for_step(run, 3, process)
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    last = max(losses(run))
    assert f"SIGTERM stopped the run at step {last}; the checkpoint is written" in output
    assert f"mnemos train --resume {run}" in output
    assert checkpoint_steps(run / "checkpoints") == [last]


def straight(folder: Path, **changes) -> dict[int, float]:
    Trainer(small(folder, name="straight", **changes)).train()
    return losses(folder / "runs" / "straight")


def resume(folder: Path, **changes):
    return Trainer(small(folder, **changes), resume=True).train()


def break_off(folder: Path, at: int, **changes) -> Path:
    """A run of which only the checkpoints up to `at` are left, as a crash leaves it: with lines of metrics beyond."""
    Trainer(small(folder, **changes)).train()
    for step in checkpoint_steps(folder / "runs" / "a" / "checkpoints"):
        if step > at:
            shutil.rmtree(folder / "runs" / "a" / "checkpoints" / f"step-{step:06d}")
    return folder / "runs" / "a"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"preset": "titans-mac", "data": {"packing": "documents"}}, marks=pytest.mark.slow),
        pytest.param(
            {"preset": "atlas-mag", "dtype": "bfloat16", "schedule": {"finish_chunk": 4, "finish_share": 0.4}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"preset": "atlas-mag", "optim": {"name": "muon"}}, marks=pytest.mark.slow),
        {"gradient_checkpointing": True, "loss": {"polarisation": 0.1, "memory_dropout": 0.5}},
    ],
    ids=["plain", "documents", "bfloat16-chunk", "muon", "checkpointing-polarised"],
)
def test_resuming_repeats_the_losses_to_the_last_bit(tmp_path, changes):
    expected = straight(tmp_path, **changes)
    run = break_off(tmp_path, 5, **changes)
    assert losses(run) == expected
    resume(tmp_path, **changes)
    assert losses(run) == expected
    assert len(read_metrics(run, "train")) == len(
        expected
    )  # lines beyond the checkpoint were cut off, and written once more


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    expected = straight(tmp_path)
    run = break_off(tmp_path, 10)
    newest = run / "checkpoints" / "step-000010"
    tensors = next((newest / "tensors").glob("*.safetensors"))
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    assert "is damaged" in problem_of(newest)
    resume(tmp_path)
    assert "step-000010 cannot be used" in events(run) and "resuming from" in events(run)
    assert losses(run) == expected


def test_a_half_written_checkpoint_is_no_checkpoint(tmp_path):
    expected = straight(tmp_path)
    run = break_off(tmp_path, 5)
    half = run / "checkpoints" / ".step-000010.part"
    half.mkdir()
    (half / "state.json").write_text("{")
    shutil.copytree(run / "checkpoints" / "step-000005", run / "checkpoints" / "step-000007")
    (run / "checkpoints" / "step-000007" / "rank-0.json").unlink()
    resume(tmp_path)
    assert not half.exists()
    assert "rank-0.json is missing" in events(run)
    assert losses(run) == expected


def test_without_a_usable_checkpoint_a_run_starts_again_and_says_so(tmp_path):
    expected = straight(tmp_path)
    run = break_off(tmp_path, 0)
    resume(tmp_path)
    assert "no checkpoint that can be used" in events(run)
    assert losses(run) == expected


def test_a_full_disk_costs_checkpoints_but_not_the_run(tmp_path):
    """A real write that fails: no file of this process may grow beyond 20 kB, until the last checkpoint."""
    trainer = Trainer(small(tmp_path, steps=7, checkpoint={"every": 2}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    one_step = trainer.loop.step

    def limited(step):
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))
        if step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return one_step(step)

    trainer.loop.step = limited
    try:
        result = trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run = tmp_path / "runs" / "a"
    assert result.step == 7 and result.saved
    assert checkpoint_steps(run / "checkpoints") == [2, 7]
    assert not list((run / "checkpoints").glob(".step*"))
    assert "no checkpoint of step 4: " in events(run) and "File too large" in events(run)
    assert "earlier ones are kept" in events(run)


def test_a_run_whose_last_checkpoint_cannot_be_written_says_so_in_its_result(tmp_path):
    trainer = Trainer(small(tmp_path, steps=2, checkpoint={"asynchronous": True}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))
    try:
        assert not trainer.train().saved
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    """Validation gets worse on purpose: the embedding, which is the head too, grows at every step after the best checkpoint."""
    config = small(tmp_path, steps=12, checkpoint={"every": 2, "keep_last": 2, "spike": 0}, watch={"validate_every": 4})
    trainer = Trainer(config)
    one_step = trainer.loop.step

    def worse(step):
        if step >= 4:
            with torch.no_grad():
                trainer.model.model.embed_tokens.weight.mul_(4)
        return one_step(step)

    trainer.loop.step = worse
    trainer.train()
    run = tmp_path / "runs" / "a"
    found = {r["step"]: r["val_loss"] for r in read_metrics(run, "validate")}
    assert found[4] < found[8] and found[4] < found[12]
    assert checkpoint_steps(run / "checkpoints") == [4, 10, 12]
    assert json.loads((run / "best.json").read_text()) == {"step": 4, "val_loss": found[4]}


def test_random_numbers_of_every_library_go_through_json():
    seed_everything(7)
    saved = json.loads(json.dumps(random_state()))
    drawn = (random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.randn())
    set_random_state(saved)
    again = (random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.randn())
    assert drawn == again


def test_a_carried_memory_that_forgets_towards_an_older_w0_resumes(tmp_path):
    """The optimiser moves W0 at every step, while a carried state keeps the one it began with."""
    towards_start = {
        "set": ("hidden_size=32", "num_hidden_layers=1", "memory={heads: 2, chunk_size: 8, retention: start}")
    }
    options = {"data": {"carry_state": True}, "model": towards_start, "checkpoint": {"every": 3}}
    Trainer(small(tmp_path, "titans-lmm", steps=3, **options)).train()
    Trainer(small(tmp_path, "titans-lmm", steps=6, **options), resume=True).train()
    assert len(losses(tmp_path / "runs" / "a")) == 6


def test_a_run_from_before_a_preset_had_a_convolution_resumes_without_one(tmp_path):
    """A run keeps the name of its preset, not its choices: those of the checkpoint's model count."""
    options = {"model": {"set": ("hidden_size=32", "num_hidden_layers=1")}, "checkpoint": {"every": 3}}
    without = {"set": (*options["model"]["set"], "attention_conv_width=0")}
    Trainer(small(tmp_path, "swa", steps=3, **options | {"model": without})).train()
    resumed = Trainer(small(tmp_path, "swa", steps=6, **options), resume=True)
    assert resumed.model.config.attention_conv_width == 0
    resumed.train()
    assert len(losses(tmp_path / "runs" / "a")) == 6


def test_the_carried_memory_is_part_of_a_checkpoint(tmp_path):
    config = small(tmp_path, data={"carry_state": True}, steps=6)
    trainer = Trainer(config)
    trainer.train()
    cache = trainer.stepper.carried.cache
    assert cache is not None and cache.length > 0
    folder = tmp_path / "runs" / "a" / "checkpoints" / "step-000006"
    assert (folder / "carried-0.safetensors").exists()
    assert state_of(tmp_path / "runs" / "a", 6)["tokens"] == 6 * 4 * 32
    other = Trainer(small(tmp_path, data={"carry_state": True}, steps=6), resume=True)
    other._begin()
    loaded = other.stepper.carried.cache
    for old, new in zip(cache.layers, loaded.layers):
        for name in old:
            tensors = (s.tensors() for s in (old[name], new[name]))
            a, b = tensors
            assert all(torch.equal(a[key], b[key]) for key in a)
