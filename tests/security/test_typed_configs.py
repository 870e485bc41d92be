"""A training config read from YAML holds values of its types, or is refused."""

from __future__ import annotations

import pytest

from mnemos.train import TrainConfig


@pytest.mark.parametrize("value", ["{a: 1}", "3", "hidden_size=8", "true"])
def test_a_list_of_settings_that_is_no_list_is_refused(value, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{set: {value}}}\n")
    with pytest.raises(ValueError, match=r"^model\.set=.* must be a list$"):
        TrainConfig.load(path)


def test_a_config_that_holds_itself_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: &m {preset: titans-mag, set: *m}\n")
    with pytest.raises(ValueError, match="must be a list"):
        TrainConfig.load(path)


def test_a_value_of_aliases_of_aliases_is_refused_without_being_written_out(tmp_path):
    path = tmp_path / "config.yaml"
    levels = ["&a0 [x, x]", *(f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
    path.write_text(f"steps: [{', '.join(levels)}]\n")
    with pytest.raises(ValueError, match=r"^steps=.{,60} must be int or nothing$"):
        TrainConfig.load(path)
