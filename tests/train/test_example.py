"""transformers.Trainer trains our models as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"


def test_the_example_with_transformers_trainer_learns_and_saves(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("transformers_trainer", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    after = example.main(["--steps", "12", "--out", str(tmp_path / "out")])
    assert after < 4.0  # 5.5 before
    assert "after 12 steps" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == [97]
