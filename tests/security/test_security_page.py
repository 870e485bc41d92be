"""SECURITY.md: each promise names tests that exist."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from mnemos import cli
from mnemos.models import MnemosCache, MnemosForCausalLM, presets
from mnemos.train import TrainConfig, Trainer, recipe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "SECURITY.md"
PROMISES = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`tests/" in line]


def test_every_promise_names_tests_that_exist():
    assert len(PROMISES) >= 15
    for line in PROMISES:
        for name, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line):
            assert re.search(rf"^def {test}\(", (ROOT / name).read_text(), re.M), f"{name}::{test} is no test"


def test_every_row_of_the_promises_has_a_test():
    table = PAGE.read_text().split("## What is promised")[1].split("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == PROMISES


def test_training_in_one_process_opens_no_port(tmp_path, monkeypatch):
    """Nor does it connect to anything, by Python or by torch.distributed."""

    def refuse(*_, **__):
        pytest.fail("training alone has opened a socket to the network")

    for name in ("bind", "listen", "connect"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("init_process_group", "TCPStore"):
        monkeypatch.setattr(f"torch.distributed.{name}", refuse)
    text = tmp_path / "story.txt"
    text.write_text("so it goes, and so it went, " * 200)
    config = recipe(TrainConfig(folder=str(tmp_path / "runs")), "debug")
    config.data.sources, config.data.cache_dir = (str(text),), str(tmp_path)
    config.model.preset, config.steps = "titans-lmm", 2
    assert Trainer(config).train().step == 2


def test_nothing_that_a_file_names_is_imported(tmp_path, monkeypatch, capsys):
    """Neither by a model, a cache nor the config of a run, although Python would find the module; --import runs it."""
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    model = MnemosForCausalLM(presets.config("titans-lmm", hidden_size=16, num_hidden_layers=1, memory_heads=1))
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text()) | {"requires_modules": ["stranger"]}
    generate = ["generate", str(tmp_path / "model"), "--max-tokens", "1"]
    for choice, status in (({}, 0), ({"structure": "stranger"}, 2), ({"features": "stranger"}, 2)):
        path.write_text(json.dumps(fields | {"memory": fields["memory"] | choice}))
        assert cli.main(generate) == status
        assert not choice or "--import stranger" in capsys.readouterr().err
    cache = model(torch.arange(3)[None], use_cache=True).past_key_values
    with monkeypatch.context() as patch:
        patch.setattr(type(model.config), "to_json_string", lambda *_, **__: path.read_text())
        cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="--import stranger"):
        MnemosCache.load(tmp_path / "cache")
    (tmp_path / "run").mkdir()
    config = TrainConfig(name="run", folder=str(tmp_path), steps=1)
    config.watch.trackers = ("stranger",)
    config.save(tmp_path / "run" / "config.yaml")
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert cli.main(["runs", "--folder", str(tmp_path)]) == 0
    assert "stranger" not in sys.modules and not (tmp_path / "ran").exists()
    assert cli.main(["--version", "--import", "stranger"]) == 0
    assert (tmp_path / "ran").exists()
    del sys.modules["stranger"]
