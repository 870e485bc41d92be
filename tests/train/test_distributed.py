"""Two real processes (torchrun, gloo) do what one does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small import losses, small

from mnemos.train import ParallelConfig, Trainer, export, load_model

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def torchrun(jobs: Path, processes: int = 2) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SRC), str(HERE)])}
    done = subprocess.run(
        [*command, str(HERE / "two_processes.py"), str(jobs)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


CASES = {
    "fsdp": dict(parallel=ParallelConfig("fsdp")),
    "ddp": dict(parallel=ParallelConfig("ddp")),
    "hybrid": dict(parallel=ParallelConfig("hybrid", shard=1), checkpoint={"asynchronous": True}),
    "pieces": dict(parallel=ParallelConfig("fsdp"), accumulate=2, data={"batch_size": 2}),
    "carried": dict(parallel=ParallelConfig("fsdp"), data={"carry_state": True}),
    "carried-ddp": dict(parallel=ParallelConfig("ddp"), data={"carry_state": True}, preset="atlas-mag"),
    "polarised": dict(parallel=ParallelConfig("fsdp"), loss={"polarisation": 0.5}),
    "muon": dict(parallel=ParallelConfig("fsdp"), optim={"name": "muon", "lr": 1e-3}, preset="atlas-mag"),
}
STEPS = 4


def config_of(folder: Path, case: str, **changes):
    return small(folder, steps=STEPS, **{"name": case, "seed": 3, "watch": {"validate_every": 2}} | CASES[case] | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case run by two processes, and one run of a single process that two go on with."""
    folder = tmp_path_factory.mktemp("two")
    jobs = folder / "jobs"
    jobs.mkdir()
    for case in CASES:
        config_of(folder, case).save(jobs / f"{case}.yaml")
    begun = config_of(folder, "carried", name="grown")
    begun.steps = 2
    Trainer(begun).train()
    begun.steps = STEPS
    begun.save(jobs / "zz-grown.yaml")
    torchrun(jobs)
    return folder


def alone(folder: Path, case: str) -> dict[int, float]:
    Trainer(config_of(folder, case, name=f"{case}-alone")).train()
    return losses(folder / "runs" / f"{case}-alone")


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(folder, case):
    expected, found = alone(folder, case), losses(folder / "runs" / case)
    assert list(found) == [1, 2, 3, 4]
    tolerance = 2e-3 if case == "muon" else 2e-5  # torch's muon orthogonalises in bfloat16
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=tolerance), f"step {step}"
    assert abs(expected[4] - expected[1]) > 0.05  # they moved: equality says something


def test_a_batch_in_two_pieces_is_the_batch_in_one(folder):
    whole, pieces = losses(folder / "runs" / "fsdp"), losses(folder / "runs" / "pieces")
    assert whole.keys() == pieces.keys()
    one = config_of(folder, "fsdp", name="whole-alone")
    Trainer(one).train()
    halves = config_of(folder, "pieces", name="pieces-alone")
    Trainer(halves).train()
    assert losses(folder / "runs" / "pieces-alone") == pytest.approx(losses(folder / "runs" / "pieces"), rel=2e-5)


@pytest.mark.parametrize("case", ["fsdp", "ddp", "carried"])
def test_one_process_goes_on_where_two_stopped(folder, case):
    source, copy = folder / "runs" / case, folder / "runs" / f"{case}-shrunk"
    shutil.copytree(source, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    config = config_of(folder, case, name=copy.name)
    assert [int(p.name[5:]) for p in sorted((copy / "checkpoints").glob("step-*"))] == [2]
    Trainer(config, resume=True).train()
    expected = losses(source)
    assert losses(copy) == pytest.approx(expected, rel=2e-5)


def test_two_processes_go_on_where_one_stopped(folder):
    assert losses(folder / "runs" / "grown") == pytest.approx(alone(folder, "carried"), rel=2e-5)


@pytest.mark.parametrize("case", ["fsdp", "ddp", "hybrid"])
def test_a_model_trained_by_two_processes_is_exported_whole(folder, case):
    from transformers import AutoModelForCausalLM

    alone(folder, case) if not (folder / "runs" / f"{case}-alone").exists() else None
    out = export(folder / "runs" / case, folder / f"out-{case}", checkpoint="last")
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(40).unsqueeze(0)
    expected = load_model(folder / "runs" / f"{case}-alone", "last")
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=2e-4)
