"""Two real processes (torchrun, gloo) do what one does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mnemos.train import ParallelConfig, Trainer, export, load_model
from mnemos.train.telemetry import read_metrics
from small import events, losses, small

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def torchrun(jobs: Path, processes: int = 2) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SRC), str(HERE)])}
    done = subprocess.run(
        [*command, str(HERE / "two_processes.py"), str(jobs)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]


CASES = {
    "fsdp": dict(
        parallel=ParallelConfig("fsdp"),
        watch={"validate_every": 4, "probe_every": 4, "probe_length": 64, "sample_tokens": 3},
    ),
    "ddp": dict(parallel=ParallelConfig("ddp")),
    "carried": dict(
        parallel=ParallelConfig("fsdp"), data={"carry_state": True}, checkpoint={"every": 2, "asynchronous": True}
    ),
}
LONGER = {
    "hybrid": dict(parallel=ParallelConfig("hybrid", shard=1), optim={"ema": 0.9}, watch={"validate_every": 2}),
    "pieces": dict(parallel=ParallelConfig("fsdp"), accumulate=2, data={"batch_size": 2}),
    "pieces-ddp": dict(parallel=ParallelConfig("ddp"), accumulate=2, data={"batch_size": 2}),
    "carried-ddp": dict(parallel=ParallelConfig("ddp"), data={"carry_state": True}, preset="atlas-mag"),
    "documents": dict(parallel=ParallelConfig("fsdp"), data={"packing": "documents"}, preset="titans-mac"),
    "polarised": dict(parallel=ParallelConfig("fsdp"), loss={"polarisation": 0.5}),
    "muon": dict(parallel=ParallelConfig("fsdp"), optim={"name": "muon", "lr": 3e-3}, preset="atlas-mag"),
}
STEPS = 4


def config_of(folder: Path, case: str, **changes):
    settings = {"name": case, "seed": 3, "checkpoint": {"every": 2}} | (CASES | LONGER)[case] | changes
    return small(folder, steps=STEPS, **settings)


def launch(folder: Path, cases) -> Path:
    jobs = folder / "jobs"
    jobs.mkdir()
    for case in cases:
        config_of(folder, case).save(jobs / f"{case}.yaml")
        Trainer(config_of(folder, case, name=f"{case}-alone")).train()
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case run by two processes and by one; and one run begun by a single process that two go on with."""
    folder = tmp_path_factory.mktemp("two")
    jobs = launch(folder, CASES)
    begun = config_of(folder, "carried", name="grown")
    shutil.copytree(folder / "runs" / "carried-alone", folder / "runs" / "grown")
    shutil.rmtree(folder / "runs" / "grown" / "checkpoints" / "step-000004")
    begun.save(jobs / "zz-grown.yaml")
    torchrun(jobs)
    return folder


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longer")
    torchrun(launch(folder, LONGER))
    return folder


def assert_alike(folder: Path, case: str, tolerance: float = 2e-5) -> None:
    expected, found = losses(folder / "runs" / f"{case}-alone"), losses(folder / "runs" / case)
    assert list(found) == [1, 2, 3, 4]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=tolerance), f"step {step}"
    assert abs(expected[4] - expected[1]) > 0.05  # they moved: equality says something


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(folder, case):
    assert_alike(folder, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONGER)
def test_so_they_do_with_everything_else_that_changes_a_step(longer, case):
    assert_alike(longer, case, 2e-3 if case == "muon" else 2e-5)  # torch's muon orthogonalises in bfloat16


def test_two_processes_measure_what_one_does(folder):
    two, one = (read_metrics(folder / "runs" / name, "validate")[-1] for name in ("fsdp", "fsdp-alone"))
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-4)
    assert two["tokens_validated"] == one["tokens_validated"]
    assert two["memory"]["perplexity_frozen"] == pytest.approx(one["memory"]["perplexity_frozen"], rel=1e-3)
    two, one = (read_metrics(folder / "runs" / name, "probe")[-1] for name in ("fsdp", "fsdp-alone"))
    assert two["gain"] == pytest.approx(one["gain"], abs=1e-3)
    texts = [(folder / "runs" / name / "samples.jsonl").read_text() for name in ("fsdp", "fsdp-alone")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", CASES)
def test_one_process_goes_on_where_two_stopped(folder, case):
    source, copy = folder / "runs" / case, folder / "runs" / f"{case}-shrunk"
    shutil.copytree(source, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    Trainer(config_of(folder, case, name=copy.name), resume=True).train()
    assert f"resuming from {copy}/checkpoints/step-000002" in events(copy)
    assert losses(copy) == pytest.approx(losses(source), rel=2e-5)


def test_two_processes_go_on_where_one_stopped(folder):
    assert "step-000002" in events(folder / "runs" / "grown")
    assert losses(folder / "runs" / "grown") == pytest.approx(losses(folder / "runs" / "carried-alone"), rel=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_model_trained_by_two_processes_is_exported_whole(folder, case):
    from transformers import AutoModelForCausalLM

    out = export(folder / "runs" / case, folder / f"out-{case}", checkpoint="last")
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(40).unsqueeze(0)
    expected = load_model(folder / "runs" / f"{case}-alone", "last")
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=2e-4)


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path, monkeypatch):
    from mnemos.train import distributed, trainer

    world = distributed.World(0, 3, torch.device("cpu"))
    monkeypatch.setattr(trainer, "open_world", lambda device: world)
    with pytest.raises(ValueError, match=r"data.batch_size=4 must be a multiple of the 3 processes"):
        Trainer(small(tmp_path))
