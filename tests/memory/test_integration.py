"""The memory among its neighbours: autocast, checkpointing, compile, DDP, FSDP2, other devices, a bare installation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import Case, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import assert_close, randomise
from mnemos.memory import MemorySpec, NeuralMemory, scan

SPECS = {
    "mlp": MemorySpec(key_dim=4, value_dim=4, expansion=2, chunk_size=8, window=3),
    "small chunks": MemorySpec(key_dim=4, value_dim=4, expansion=2, chunk_size=4),
    "gated, muon": MemorySpec(key_dim=4, value_dim=4, structure="gated_mlp", expansion=2, chunk_size=8, rule="muon"),
    "token": MemorySpec(key_dim=4, value_dim=3, structure="linear", anchor="token", features="monomials"),
}


@pytest.mark.parametrize("name", SPECS)
def test_compiled_scan_has_no_graph_break_and_the_same_results_and_gradients(name):
    spec = SPECS[name]
    x = inputs(Case(spec), length=13, grad=True)

    def run(q, k, v, gates, W0):
        y, state = scan(q, k, v, gates, spec.initial_state(W0, batch=2), spec, x.features)
        return y, state.weights

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaves = [x.q, x.k, x.v, x.gates.lr, x.gates.retain, *x.W0]
    results = []
    for function in (run, compiled):
        y, weights = function(x.q, x.k, x.v, x.gates, x.W0)
        total = y.square().sum() + sum(w.sum() for w in weights)
        results.append([y, *weights, *torch.autograd.grad(total, leaves)])
    for a, b in zip(*results):
        assert_close(b, a, 1e-12)


@pytest.mark.slow
def test_inductor_compiles_the_layer_without_a_graph_break():
    torch._dynamo.reset()
    layer = randomise(NeuralMemory(dim=32, heads=2, chunk_size=16, window=4, gate="token"))
    x = torch.randn(2, 40, 32)
    y, _ = layer(x)
    compiled, _ = torch.compile(layer, fullgraph=True)(x)
    assert_close(compiled, y, 1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_autocast_stays_near_float32_with_float32_state(name):
    spec = SPECS[name]
    x = inputs(Case(spec, dtype=torch.float32), length=21, grad=True)

    def run():
        y, state = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec, x.features)
        return y, state, torch.autograd.grad(y.square().sum(), [x.k, x.v, x.gates.lr, *x.W0])

    y, state, grads = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, low_state, low_grads = run()
    assert low_state.weights[0].dtype == torch.float32
    assert_close(low, y, 0.03, "y")
    assert_close(low_state.weights[0], state.weights[0], 0.05, "weights")
    for a, b in zip(low_grads, grads):
        assert torch.isfinite(a).all()
        assert_close(a, b, 0.2, "gradient")


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_inputs_give_bfloat16_outputs_from_a_float32_memory(name):
    spec = SPECS[name]
    x = inputs(Case(spec, dtype=torch.float32), length=21)
    y, _ = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec, x.features)
    half = [t.bfloat16() for t in (x.q, x.k, x.v)]
    low, state = scan(*half, x.gates.map(lambda g: g.bfloat16()), x.state(spec), spec, x.features)
    assert low.dtype == torch.bfloat16 and state.weights[0].dtype == torch.float32
    assert_close(low, y, 0.05)


@pytest.mark.parametrize("name", [*SPECS, "own structure"])
def test_non_reentrant_checkpointing_changes_nothing(name):
    spec = SPECS.get(name) or MemorySpec(key_dim=4, value_dim=4, structure="test_composed", chunk_size=4)
    x = inputs(Case(spec), length=21, grad=True)

    def run(q, k, v):
        return scan(q, k, v, x.gates, x.state(spec), spec, x.features)[0]

    leaves = [x.q, x.k, x.v, x.gates.lr, *x.W0]
    plain = torch.autograd.grad(run(x.q, x.k, x.v).square().sum(), leaves)
    saved = torch.autograd.grad(checkpoint(run, x.q, x.k, x.v, use_reentrant=False).square().sum(), leaves)
    for a, b in zip(saved, plain):
        assert_close(a, b, 1e-14)


def test_a_second_derivative_is_refused_rather_than_wrong():
    spec = SPECS["mlp"]
    x = inputs(Case(spec), length=9, grad=True)
    y, _ = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(y.square().sum(), x.k, create_graph=True)


def test_shapes_flow_on_the_meta_device():
    spec = SPECS["mlp"]
    x = inputs(Case(spec, dtype=torch.float32), length=21)
    meta = [t.to("meta") for t in (x.q, x.k, x.v)]
    layer = NeuralMemory(dim=32, heads=2, chunk_size=8).to("meta")
    assert meta[0].device.type == "meta"
    assert layer.initial_state(2).weights[0].device.type == "meta"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = NeuralMemory(dim=16, heads=2, chunk_size=4, window=3, gate="token")
        self.second = NeuralMemory(dim=16, heads=2, chunk_size=4, rule="muon")

    def forward(self, x):
        x = x + self.first(x)[0]
        return x + self.second(x)[0]


def train_steps(model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_model() -> Model:
    torch.manual_seed(0)
    return randomise(Model(), scale=0.1).double()


def data() -> torch.Tensor:
    return torch.randn(4, 11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def worker(rank: int, port: int, kind: str, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = make_model()
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.first)
        fully_shard(model.second)
        wrapped = fully_shard(model)
    losses = train_steps(wrapped, data().chunk(2)[rank])
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        queue.put((mean / 2).tolist())
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(kind):
    expected = train_steps(make_model(), data())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, port, kind, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = queue.get(timeout=240)
    for process in processes:
        process.join(timeout=60)
    assert found == pytest.approx(expected, rel=1e-10)


def test_the_memory_imports_with_torch_and_safetensors_alone():
    code = """
import sys
allowed = {"torch", "safetensors", "mnemos"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tyro", "yaml", "rich", "transformers", "tokenizers", "datasets", "matplotlib", "lm_eval", "fastapi", "einops"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch
from mnemos.memory import NeuralMemory
y, state = NeuralMemory(dim=32, heads=2)(torch.randn(1, 5, 32))
print(y.shape[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5"
