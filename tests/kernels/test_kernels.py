"""The compiled backend: the same numbers whatever the threads, and a clear word where it cannot be had."""

from __future__ import annotations

import inspect

import pytest
import torch

from helpers import NO_KERNEL, assert_close, needs_kernel
from mnemos import dispatch
from mnemos.backends.cpu import build
from mnemos.dispatch import reasons
from mnemos.memory import Gates, MemorySpec, NeuralMemory, scan

SPEC = MemorySpec(key_dim=8, value_dim=8, chunk_size=16)
MUON = MemorySpec(key_dim=8, value_dim=8, chunk_size=16, rule="muon")
START = MemorySpec(key_dim=8, value_dim=8, chunk_size=16, retention="start")


def tokens(batch: int = 2, length: int = 77, heads: int = 3, spec: MemorySpec = SPEC):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, batch, length, heads, 8) * 0.3
    gates = Gates(torch.rand(batch, length, heads) * 0.1, *torch.rand(2, batch, length, heads))
    W0 = [torch.randn(heads, *shape) * 0.3 for shape in spec.shapes]
    return [q.requires_grad_(), k, v, gates, spec.initial_state(W0, batch)]


@pytest.fixture
def fresh(monkeypatch):
    """What is known about the machine's compiler is found out anew, and forgotten afterwards."""
    caches = build.library, build.gemm, build._missing
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


@needs_kernel
@pytest.mark.parametrize("spec", [SPEC, MUON, START], ids=lambda spec: f"{spec.rule}-{spec.retention}")
def test_any_number_of_threads_gives_the_same_bits(spec):
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            q, *rest = tokens(spec=spec)
            y, state = scan(q, *rest, spec, backend="cpu")
            found.append([y, *state.weights, *torch.autograd.grad(y.square().sum(), q)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


WIDE = dict(dim=136, heads=1)  # 544 hidden dims: deeper than the kernels' own products go


@needs_kernel
@pytest.mark.parametrize(
    "choices",
    [
        dict(),
        dict(rule="muon", structure="gated_mlp", commit_every=4),
        dict(retention="start"),
        dict(retention="start", structure="gated_mlp", momentum=False),
        WIDE,
        WIDE | dict(rule="muon"),
        WIDE | dict(retention="start"),
    ],
    ids=str,
)
def test_a_layer_learns_the_same_by_either_backend(choices):
    choices = dict(dim=32, heads=2) | choices
    x, grads = torch.randn(2, 100, choices["dim"]), []
    for backend in ("torch", "cpu"):
        torch.manual_seed(1)
        layer = NeuralMemory(chunk_size=16, backend=backend, **choices)
        layer(x)[0].square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    for a, b in zip(*grads):
        assert_close(a, b, 5e-4 if "rule" in choices else 2e-5)  # Newton–Schulz amplifies rounding


def test_without_a_compiler_the_torch_path_does_the_work(fresh):
    fresh.setattr(build.shutil, "which", lambda name: None)
    y, _ = scan(*tokens(), SPEC)
    right, _ = scan(*tokens(), SPEC, backend="torch")
    assert torch.equal(y, right)
    with pytest.raises(ValueError, match=r"backend='cpu' is not available: there is no C\+\+ compiler"):
        scan(*tokens(), SPEC, backend="cpu")


def test_a_compiler_that_fails_is_quoted(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(build, "FLAGS", ["-no-such-flag-of-any-compiler"])
    if build.shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert "failed: " in str(build.unavailable_reason("chain"))
    assert list((tmp_path / "mnemos" / "kernels").iterdir()) == []


@needs_kernel
def test_a_broken_file_in_the_cache_is_compiled_anew(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    build.library("decay")
    whole = next((tmp_path / "one" / "mnemos" / "kernels").glob("decay-*"))
    broken = tmp_path / "other" / "mnemos" / "kernels" / whole.name
    broken.parent.mkdir(parents=True, mode=0o700)
    broken.write_bytes(b"no library")
    build.library.cache_clear()
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert build.library("decay").mnemos_decay_float
    assert len(broken.read_bytes()) > 1000


@pytest.mark.skipif(not hasattr(build.os, "getuid"), reason="folders have owners on POSIX systems alone")
def test_a_cache_that_others_may_write_to_is_not_used(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mnemos" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    if build.shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    assert "can be written to by others" in str(build.unavailable_reason("chain"))


def test_what_the_kernel_does_not_know_goes_by_torch():
    k = torch.randn(1, 4, 2, 8)
    for spec in (
        MemorySpec(key_dim=8, value_dim=8, structure="linear", anchor="token"),
        MemorySpec(key_dim=8, value_dim=8, depth=17),
        MemorySpec(key_dim=8, value_dim=8, depth=17, rule="muon"),
        MemorySpec(key_dim=8, value_dim=8, rule="muon", retention="start"),
    ):
        assert reasons("scan", k, spec)["cpu"] is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in str(reasons("scan", k, SPEC)["cpu"])
    with torch.no_grad():
        assert "rule='muon' with commit_every=1" in str(reasons("step", k[:, :1], MUON)["cpu"])
    assert reasons("scan", k, SPEC)["torch"] is None
    if NO_KERNEL is None:
        assert reasons("scan", k, START)["cpu"] is None
    with pytest.raises(ValueError, match="backend='cuda' is unknown; choose one of 'auto', 'torch', 'cpu'"):
        scan(*tokens(), SPEC, backend="cuda")


def arguments(function) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_a_kernel_takes_the_arguments_of_its_operation():
    """A kernel that lacks a default would fail at the calls that leave it out."""
    import mnemos.models  # noqa: F401 (operations of every folder)

    dispatch.load()
    assert len(dispatch.OPERATIONS) >= 7
    for name, plain in dispatch.OPERATIONS.items():
        for kernel in dispatch._KERNELS[name]:
            assert arguments(kernel.function) == arguments(plain), name
            assert [n for n, _ in arguments(kernel.supports)] == [n for n, _ in arguments(plain)], name
