"""SECURITY.md: each promise names tests that exist."""

import re
import socket
from pathlib import Path

import pytest

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
