"""The product of small matrices: the same as torch's for any sizes, at any register width, and nothing outside of them is touched."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import subprocess
from pathlib import Path

import pytest
import torch

from helpers import needs_kernel
from mnemos.backends.cpu.build import HERE, compiler

WIDTHS = {"native": [], "no avx512": ["-mno-avx512f"], "no avx": ["-mno-avx"]}
ROWS, COLUMNS, DEPTHS = (1, 3, 8, 14, 67), (1, 4, 15, 16, 17, 33, 49, 66, 131), (1, 2, 16, 37)


@pytest.fixture(scope="module", params=WIDTHS)
def compiled(request, tmp_path_factory):
    if WIDTHS[request.param] and "-march=native" not in compiler():
        pytest.skip("these widths are of x86")
    made = tmp_path_factory.mktemp("product") / "product.so"
    source = Path(__file__).with_name("product.cpp")
    subprocess.run([*compiler(), *WIDTHS[request.param], f"-I{HERE}", "-o", str(made), str(source)], check=True)
    return ctypes.CDLL(str(made))


class Room:
    """Memory with nothing behind it: a number read or written past its end stops the process."""

    def __init__(self, pages: int = 64):
        self.size = pages * mmap.PAGESIZE
        self.map = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        self.end = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + self.size
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.end), mmap.PAGESIZE, 0) == 0

    def put(self, x: torch.Tensor) -> int:
        assert x.nbytes <= self.size
        at = self.end - x.nbytes
        ctypes.memmove(at, x.data_ptr(), x.nbytes)
        return at


@functools.cache
def rooms() -> list[Room]:
    return [Room() for _ in range(3)]


def run(compiled, x, y, tx, ty, out, beta, alpha, symmetric=False):
    kind = ctypes.c_double if x.dtype == torch.float64 else ctypes.c_float
    function = compiled.product_double if x.dtype == torch.float64 else compiled.product_float
    function.restype = None
    at = [room.put(a) for room, a in zip(rooms(), (out, x, y), strict=True)]
    sizes = [ctypes.c_int64(n) for n in (*out.shape, x.shape[0] if tx else x.shape[1])]
    pointer = ctypes.c_void_p
    function(pointer(at[0]), pointer(at[1]), tx, pointer(at[2]), ty, *sizes, kind(beta), kind(alpha), int(symmetric))
    result = torch.empty_like(out)
    ctypes.memmove(result.data_ptr(), at[0], out.nbytes)
    return result


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tx", [0, 1])
@pytest.mark.parametrize("ty", [0, 1])
def test_a_product_is_torchs(compiled, dtype, tx, ty):
    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-5
    for (r, c, k), beta in itertools.product(itertools.product(ROWS, COLUMNS, DEPTHS), (0.0, -0.5)):
        x, y, out = (torch.randn(*size, generator=generator, dtype=dtype) for size in ((r, k), (k, c), (r, c)))
        if beta == 0:
            out = torch.full_like(out, torch.nan)  # what was there is not read
        expected = 1.5 * (x @ y) + (beta * out if beta else 0)
        given = (a.mT.contiguous() if turned else a for a, turned in ((x, tx), (y, ty)))
        found = run(compiled, *given, tx, ty, out, beta, 1.5)
        assert (found - expected).abs().max() <= tolerance * k**0.5 * 4, (r, c, k, beta)


@needs_kernel
def test_half_of_a_symmetric_product_is_mirrored(compiled):
    generator = torch.Generator().manual_seed(0)
    for d, k in itertools.product(COLUMNS, DEPTHS):
        x, other = torch.randn(2, d, k, generator=generator, dtype=torch.float64)
        before = torch.randn(d, d, generator=generator, dtype=torch.float64)
        before = before + before.mT
        found = run(compiled, x, x, 0, 1, before, 0.5, 2.0, symmetric=True)
        torch.testing.assert_close(found, 2 * x @ x.mT + 0.5 * before, rtol=0, atol=1e-12)
        if d > 3 * compiled.lanes():  # what is not symmetric shows which half was computed
            found = run(compiled, x, other, 0, 1, before, 0.0, 1.0, symmetric=True)
            torch.testing.assert_close(found[0, -1], x[-1] @ other[0])
            assert found[0, -1] == found[-1, 0]
