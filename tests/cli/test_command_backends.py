"""`mnemos backends`."""

from __future__ import annotations

import pytest

from helpers import needs_kernel
from mnemos.cli import main
from mnemos.models import presets


def rows(printed: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line.startswith("│")
    ]
    return {cell[0]: cell[1:] for cell in cells}


@needs_kernel
def test_every_memory_has_its_backends_and_reasons(capsys):
    assert main(["backends"]) == 0
    printed = capsys.readouterr().out
    assert "cpu: available" in printed and "torch: available" in printed
    found = rows(printed)
    assert set(found) == {name for name in presets.names() if presets.config(name, "nano").has_memory}
    assert found["titans-mag"] == ["cpu", "cpu", ""]
    assert found["atlas"] == ["cpu", "cpu", ""]
    assert found["atlas-interval"][:2] == ["cpu", "torch"] and "muon" in found["atlas-interval"][2]
    assert found["deltanet"][:2] == ["torch", "torch"] and "anchor='token'" in found["deltanet"][2]


def test_types_that_kernels_do_not_compute_go_by_torch(capsys):
    assert main(["backends", "--dtype", "bfloat16"]) == 0
    assert {row[1] for row in rows(capsys.readouterr().out).values()} == {"torch"}


def test_an_unknown_device_is_a_sentence(capsys):
    assert main(["backends", "--device", "nonsense"]) == 2
    assert "device 'nonsense' is not available here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_backend_says_whether_it_is_available(name):
    from mnemos.dispatch import unavailable_reason

    assert unavailable_reason(name) is None or isinstance(unavailable_reason(name), str)
