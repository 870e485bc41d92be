"""Compiles the C++ sources of this folder, once per machine and version, finds the matrix product that torch carries, and tells which
tensors kernels of one token read."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import deterministic

from . import cache
from .cache import Unavailable
from .operators import PLAIN, constant

FLAGS = ["-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp", "-shared"]
COMPILE_SECONDS = 300
Shape = tuple[int, ...]
SMALL_NUMEL = 1 << 15  # inputs up to which one call of a kernel is faster than a chain of torch operations
HERE = Path(__file__).parent


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The compiled `name`.cpp; `Unavailable` where it cannot be compiled or loaded.

    It is kept in the user's cache folder ($XDG_CACHE_HOME/mnemos/kernels), under a name made of the sources, the flags, the processor
    and the file's own checksum, so that a change of any of them compiles anew.
    """
    sources = [HERE / f"{name}.cpp", *sorted(HERE.glob("*.h"))]
    command = compiler()
    made_of = "\n".join([*(x.read_text() for x in sources), *command, _processor()])
    stem = f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    try:
        folder = cache.kernel_folder()
        found = cache.load(folder, stem)
        if found is None:
            _compile([*command, str(sources[0])], folder, stem)
            found = cache.load(folder, stem)
    except OSError as failed:
        raise Unavailable(f"the compiled kernel cannot be kept or loaded: {failed}") from None
    if found is None:
        raise Unavailable(f"the compiled kernel in {folder} cannot be loaded")
    return found


def compiler() -> list[str]:
    """The compiler of this machine, with its flags for this processor; `Unavailable` where there is none."""
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise Unavailable("there is no C++ compiler (c++, g++ or clang++) on this machine")
    x86 = platform.machine() in ("x86_64", "AMD64")
    return [found, *FLAGS, "-fPIC", "-march=native" if x86 else "-mcpu=native"]


def _compile(command: list[str], folder: Path, stem: str) -> None:
    """Into a file of another name first: a half-written one is never loaded, and two processes do not meet."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"mnemos: compiling {Path(command[-1]).name} for this processor: some seconds, once", file=sys.stderr)
    cache.remove_stale(folder)
    handle, made = tempfile.mkstemp(prefix=f".{stem}-", suffix=".part", dir=folder)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True, timeout=COMPILE_SECONDS)
        if done.returncode:
            raise Unavailable(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[0][:200]}")
        cache.publish(made, folder, stem)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took longer than {COMPILE_SECONDS} seconds") from None
    finally:
        Path(made).unlink(missing_ok=True)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor()


@constant
def unavailable_reason(*names: str) -> str | None:
    """Why these kernels are not available on this machine, or None. The first call compiles them: some seconds, once per machine."""
    return _missing(names)


@functools.cache
def _missing(names: tuple[str, ...]) -> str | None:
    try:
        list(map(library, names)), gemm(torch.float32), gemm(torch.float64)
    except Unavailable as reason:
        return str(reason)
    return None


@functools.cache
def gemm(dtype: torch.dtype) -> int:
    """Address of the Fortran matrix product of this type in torch's own library; `Unavailable` where it shows none."""
    name = {torch.float32: "sgemm_", torch.float64: "dgemm_"}[dtype]
    folder = Path(torch.__file__).parent / "lib"
    for file in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / file).exists():
            try:
                return ctypes.cast(getattr(ctypes.CDLL(str(folder / file)), name), ctypes.c_void_p).value or 0
            except (AttributeError, OSError):
                break
    raise Unavailable(f"torch {torch.__version__} does not show its matrix product {name}")


def poison() -> bool:
    """Whether kernels fill fresh memory with NaN."""
    return torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory  # ty: ignore[missing-attribute]


def unsupported_call(*tensors: Tensor | None) -> str | None:
    """Why the kernels for one token do not compute with these tensors, or None if they do."""
    if torch.is_grad_enabled():
        return "the kernels for one token have no gradients"
    if torch._C._get_tracing_state() is not None:
        return "a traced model needs torch operations"
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return "torch.func and autocast need torch operations"
    first = tensors[0]
    if first is None or first.dtype not in (torch.float32, torch.float64):
        return "the kernels compute in float32 and float64"
    dtype = first.dtype
    for x in tensors:
        if x is not None and (type(x) not in PLAIN or not x.is_cpu or x.dtype is not dtype):
            return "tensors must be plain tensors of one type in the CPU's memory"
    return unavailable_reason("token")


def readable(parameters: Sequence[Tensor | None], shapes: Sequence[Shape | None], dtype: torch.dtype) -> bool:
    """Whether a kernel may read these parameters: contiguous, in the CPU's memory, and of the shapes that the module was made with."""
    for x, shape in zip(parameters, shapes, strict=True):
        if x is None:
            if shape is not None:
                return False
        elif x.shape != shape or type(x) not in PLAIN or not (x.is_cpu and x.dtype is dtype and x.is_contiguous()):
            return False
    return True
