"""Threads that help a kernel of one token: the same bits with and without them, with several callers at once, and after a fork."""

import os
import threading

import pytest
import torch

from mnemos.backends.cpu import token
from mnemos.backends.cpu.build import unavailable_reason
from mnemos.models import MnemosCache, MnemosForCausalLM, presets

pytestmark = pytest.mark.skipif(unavailable_reason("token") is not None, reason="no compiled kernels")


@pytest.fixture
def two_threads():
    """Kernels share every loop among two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    token.share_from(1, 1)
    yield
    token.share_from()
    torch.set_num_threads(before)


@torch.no_grad()
def decoded(model, rows: int, steps: int) -> list[torch.Tensor]:
    """The logits of each step of a batch."""
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (rows, 12 + steps))
    cache = MnemosCache.stack([model.state(ids[i : i + 1, : 5 + i % 7]) for i in range(rows)]).with_inplace(True)
    found = []
    for t in range(steps):
        output = model(ids[:, 12 + t : 13 + t], past_key_values=cache, use_cache=True)
        cache = output.past_key_values.with_inplace(True)
        found.append(output.logits)
    return found


def small():
    torch.manual_seed(0)
    config = presets.config("titans-mag", "nano", vocab_size=64, hidden_size=32, num_hidden_layers=2)
    return MnemosForCausalLM(config).double().eval()


def test_callers_at_the_same_time_get_the_bits_of_one_alone(two_threads):
    model, found = small(), {}
    token.share_from()
    alone = decoded(model, 6, 40)
    token.share_from(1, 1)

    def run(i: int) -> None:
        found[i] = decoded(model, 6, 40)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for logits in found.values():
        assert all(torch.equal(a, b) for a, b in zip(alone, logits, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process with threads
def test_a_forked_process_computes_without_the_threads_of_its_parent(two_threads):
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    x, weight = torch.randn(4, 8), torch.randn(5, 8)
    right = token.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(token.linear(x, weight), right) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 17, 32])
def test_few_rows_are_mapped_as_torch_maps_them(two_threads, rows):
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((rows, 37), (101, 37), (101,)))
    for given in (None, bias):
        found = token.linear(x, weight, given)
        assert torch.allclose(found, torch.nn.functional.linear(x, weight, given), rtol=1e-12, atol=1e-12)
