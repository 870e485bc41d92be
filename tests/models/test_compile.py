"""`torch.compile(model, fullgraph=True)` of a training step: loss and gradients of eager mode, for one preset of every family."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import lookup_backend
from zoo import make, tokens

from helpers import NO_KERNEL, assert_close, randomise
from mnemos.memory import NeuralMemory

FAMILIES = {  # and the kernel of its scan while torch compiles, None: torch operations
    "titans-mag": "chain_scan",  # linear rule, a network
    "deltanet": None,  # solved
    "atlas": "windowed_scan",  # windowed
    "atlas-interval": "muon_scan",  # committed
    "deeptransformer": None,  # growing
    "titans-mac": "chain_scan",
    "titans-mag towards zero": "chain_scan",
    "atlas-mag towards zero": "windowed_scan",
    "deltanet towards the start": None,
    "swa": None,
}


def training_step(model, run, ids) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = run(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def same_training_step(model, compiled, length: int, tolerance: float) -> None:
    """The compiled model first: nothing may depend on an earlier call in eager mode."""
    ids = tokens(2, length)
    loss, grads = training_step(model, compiled, ids)
    expected, right = training_step(model, model, ids)
    assert_close(loss, expected, tolerance, "loss")
    for name, grad in right.items():
        assert grad is not None and grads[name] is not None, name
        assert_close(grads[name], grad, tolerance, name)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step_is_one_graph_with_the_results_of_eager_mode(name):
    model, targets = randomise(make(name, num_hidden_layers=1), scale=0.15).train(), set()

    def backend(graph, example):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, example)

    same_training_step(model, torch.compile(model, fullgraph=True, backend=backend), 8, 1e-11)
    if NO_KERNEL is None:
        scans = {target.split(".")[1] for target in targets if target.startswith("mnemos.") and "_scan" in target}
        assert scans == {FAMILIES[name]} - {None}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_inductor_has_the_results_of_eager_mode(name):
    model = randomise(make(name, num_hidden_layers=1), scale=0.15).train()
    same_training_step(model, torch.compile(model, fullgraph=True), 20, 1e-10)


def test_backend_torch_compiles_torch_operations():
    layer, targets = NeuralMemory(dim=8, heads=2, chunk_size=4, w0_branch=False, backend="torch"), set()

    def backend(graph, example):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(layer, fullgraph=True, backend=backend)(torch.randn(1, 4, 8))
    assert targets and not any(target.startswith("mnemos.") for target in targets)
