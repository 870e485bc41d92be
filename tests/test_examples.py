"""The examples with a memory as a layer, at tiny sizes: their data is what they say, and their tables come from trained networks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def series():
    return example("time_series")


def test_the_forecasters_are_trained_and_compared_by_day(series, capsys):
    errors = series.main(["--steps", "40", "--days", "4", "--test-series", "16"])
    assert errors.keys() == {"no memory", "learning off", "memory", "average"}
    assert all(len(row) == 4 and min(row) > series.NOISE**2 / 2 for row in errors.values())
    assert sum(errors["memory"]) < sum(errors["no memory"]) and errors["memory"] != errors["learning off"]
    printed = capsys.readouterr().out
    assert f"{errors['memory'][0]:.3f}" in printed and "parameters, 40 steps" in printed


def test_without_noise_the_average_is_exact_once_both_kinds_of_days_were_read(series):
    series.NOISE = 0.0
    loads, holiday = series.make_series(32, 6, torch.Generator().manual_seed(0))
    _, y = series.inputs_and_targets(loads, holiday)
    last = slice(-series.HOURS, None)
    seen = (holiday[:, : -2 * series.HOURS] == holiday[:, -1:]).any(1)
    assert seen.any()
    torch.testing.assert_close(series.average_forecast(loads, holiday)[seen, last], y[seen, last])


def test_a_forecast_depends_on_nothing_that_is_later(series):
    loads, holiday = series.make_series(2, 3, torch.Generator().manual_seed(0))
    model = series.Forecaster(series.inputs_and_targets(loads, holiday)[0].shape[-1])
    changed = loads.clone()
    changed[:, 40:] += 1.0  # inputs of hour 39 and earlier end with the load of hour 39
    with torch.no_grad():
        a, b = (model(series.inputs_and_targets(x, holiday)[0]) for x in (loads, changed))
    known = 40 - series.LAGS + 1
    assert torch.equal(a[:, :known], b[:, :known]) and not torch.equal(a[:, known], b[:, known])
    early, late = (series.average_forecast(x, holiday) for x in (loads, changed))
    assert torch.equal(early[:, :known], late[:, :known])


def test_vision_transformers_are_trained_and_compared(capsys):
    vision = example("vision_transformer")
    accuracy = vision.main(["--steps", "70", "--test-images", "500"])
    assert accuracy.keys() == {"patches alone", "attention", "memory", "memory, learning off"}
    assert accuracy["memory"] > 0.16 and all(0 <= a <= 1 for a in accuracy.values())
    assert f"{accuracy['memory']:.1%}" in capsys.readouterr().out


def test_images_show_the_digit_of_their_label():
    """Digits without noise, averaged by label, resemble the bitmap of their label most."""
    vision = example("vision_transformer")
    images, digits = vision.make_images(4000, torch.Generator().manual_seed(0))
    means = torch.stack([images[digits == d].mean(0) for d in range(10)])  # 10 28 28
    grid = torch.nn.functional.affine_grid(
        torch.tensor([[[1.5 * 1.4, 0, 0], [0, 1.5, 0]]]).expand(10, -1, -1), [10, 1, 28, 28], align_corners=False
    )
    drawn = torch.nn.functional.grid_sample(vision.glyphs(), grid, align_corners=False).squeeze(1)
    a, b = (torch.nn.functional.normalize((x - x.mean(0)).flatten(1), dim=1) for x in (means, drawn))
    assert ((a @ b.mT).argmax(1) == torch.arange(10)).sum() >= 9  # the mean of many moved 8 resembles a 0
