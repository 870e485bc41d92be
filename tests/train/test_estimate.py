"""`mnemos train --dry-run`: counts are the model's, memory is what a forward pass really keeps, nothing is started."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mnemos.cli import main
from mnemos.models import MnemosForCausalLM, presets
from mnemos.train.config import TrainConfig, merge
from mnemos.train.estimate import estimate
from mnemos.train.recipes import recipe
from mnemos.train.telemetry import flops_per_token


def small(**fields) -> TrainConfig:
    model = {"preset": "titans-mag", "set": ("hidden_size=32", "num_hidden_layers=2", "memory_heads=2")}
    return merge(TrainConfig(), {"model": model, "data": {"seq_len": 256, "batch_size": 4}, "steps": 7} | fields)


def kept(model: MnemosForCausalLM, ids: torch.Tensor) -> int:
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(ids, use_cache=False, logits_to_keep=1)
        return sum(found.values())


def test_the_counts_are_those_of_the_model():
    found = estimate(small())
    model = MnemosForCausalLM(found.config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.steps, found.tokens) == (7, 7 * 4 * 256)
    assert found.flops == found.tokens * flops_per_token(model, 256)
    assert found.weights == 16 * found.parameters


def test_the_arithmetic_of_muon_is_counted():
    """As much more than without it as a counter says of its iteration."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "memory_heads": 1, "memory_chunk_size": 64}
    plain, muon = (
        flops_per_token(MnemosForCausalLM(presets.config("atlas-interval", "nano", memory_rule=rule, **sizes)), 256)
        for rule in ("gd", "muon")
    )
    spec = presets.config("atlas-interval", "nano", **sizes).memory_config.spec
    with FlopCounterMode(display=False) as counter:
        for shape in spec.shapes:
            X = torch.randn(sorted(shape))
            for _ in range(spec.ns_steps):
                A = X @ X.mT
                X = (A + A @ A) @ X
    assert muon - plain == 3 * counter.get_total_flops() / 64


@pytest.mark.parametrize("preset", ["titans-mag", "titans-mac", "swa"])
def test_the_memory_is_what_a_forward_pass_keeps(preset):
    found = estimate(merge(small(), {"model": {"preset": preset, "set": ("hidden_size=32", "num_hidden_layers=2")}}))
    ids = torch.randint(256, (4, 256))
    assert found.activations == pytest.approx(kept(MnemosForCausalLM(found.config).train(), ids), rel=0.25)


def test_sharding_checkpointing_and_bfloat16_need_less():
    whole = estimate(small())
    assert (
        estimate(small(), 4).weights == whole.weights // 4
        and estimate(small(), 4).activations == whole.activations // 4
    )
    assert estimate(small(parallel={"strategy": "ddp"}), 4).weights == whole.weights
    assert estimate(small(gradient_checkpointing=True)).activations < 0.7 * whole.activations
    assert estimate(small(dtype="bfloat16")).activations == pytest.approx(whole.activations / 2, abs=1)
    with pytest.raises(ValueError, match="batch_size=4 must be a multiple of the 3 processes"):
        estimate(small(), 3)


def test_a_recipe_of_the_papers_can_be_dry_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--recipe", "170m", "--preset", "titans-lmm", "--dry-run", "8"]) == 0
    printed = capsys.readouterr().out
    count = presets.count(presets.config("titans-lmm", "170m", vocab_size=32000))
    assert f"{count:,}" in printed and "28,611 steps" in printed and "GiB" in printed
    assert not list(tmp_path.iterdir())  # nothing was started
    assert estimate(recipe(TrainConfig(), "170m"), 8).memory < 80e9
    assert main(["train", "--dry-run", "0"]) == 2
