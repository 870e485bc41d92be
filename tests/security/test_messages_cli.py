"""Mistakes on the command line: one line on stderr, exit status 1 or 2, never a traceback."""

from __future__ import annotations

import io
import json
import sys

import pytest

from mnemos import cli
from mnemos.cli.usage import sentence
from mnemos.train import Trainer, load_model
from small import small

DEEP = 3000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    return Trainer(small(folder, "titans-lmm", steps=2)).train().path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MNEMOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * DEEP + "]" * DEEP)
    (tmp_path / "deep.json").write_text("[" * DEEP)


LONG = "x" * 300
MISTAKES = {
    "train --steps ten": "--steps 'ten' must be a whole number or None",
    "train --stps 3": "there is no option --stps; did you mean --steps?",
    "train --lr abc": "--lr 'abc' must be a number",
    "train --optimizer adam": "--optimizer 'adam' is unknown; did you mean adamw?",
    "train --steps 0": "steps=0 must be a whole number >= 1",
    "train --optim.betas 0.9": "'--optim.betas'. Expected 2 values",
    "train --optim.betas a b": "--optim.betas 'a', 'b' cannot be read as numbers",
    "train junk": "'junk' is not expected there",
    "train --preset titan-mag": "preset 'titan-mag' is unknown; did you mean titans-mag?",
    "train --size nanno": "size 'nanno' is unknown; did you mean nano?",
    "train --recipe quik": "recipe 'quik' is unknown; did you mean quick?",
    "train --config deep.yaml": "deep.yaml is not a readable config: it is nested too deeply",
    "train --dry-run --tokens inf": "tokens='inf' must be a number such as 200M",
    "train --dry-run --model.set attention_window=[": "model.set='attention_window=[' is not YAML",
    f"train --dry-run --model.set attention_window={'[' * DEEP}": "is nested too deeply",
    "train --dry-run --model.set memory=5": "memory=5 must hold names and values",
    f"train --seed {10**30}": "must be below 2**63",
    "train --device meta": "device='meta' holds no numbers",
    f"train --data {LONG}": "does not exist",
    f"train --data text.txt --tokenizer {LONG}": "tokenizer",
    "train --output-dir": "--output-dir needs a value",
    "train --output-dir / --dry-run": "--output-dir '/' must name the folder of the run",
    "trian": "command 'trian' is unknown; did you mean train?",
    "--versoin": "there is no option --versoin",
    "": "choose one of ablate, analyze",
    "generate": "needs MODEL",
    "generate {run} --max-tokens a": "--max-tokens 'a' must be a whole number",
    "generate {run} --prompt=": "prompt is empty: give at least one character",
    f"generate {{run}} --seed {10**30}": "seed=",
    "generate {run} --device meta": "device='meta' holds no numbers",
    "generate {runs}": "is a folder of runs, not a run: choose one of",
    f"generate {LONG}": "is neither a run",
    "eval {run} --suite needel": "suite 'needel' is unknown; did you mean needle?",
    "eval {run} --suite mad --mad selectve-copying": "did you mean selective-copying?",
    "eval {run} --suite perplexity --text nope.txt": "nope.txt is neither a file nor a folder",
    "eval {run} --lengths abc": "--lengths 'abc' cannot be read as whole numbers",
    "eval {run} --device potato": "device='potato' is unknown",
    "eval {run} --device cuda:99": "device='cuda:99'",
    "eval {run} --dtype int8": "dtype='int8' is unknown",
    "eval {run} --watch nan --once": "poll=nan must be > 0 seconds",
    "eval {run} --suite capacity --output .": "output='.' is a folder",
    "eval {run} --suite capacity --output no/such/eval.json": "no/such is not a folder",
    "eval {run} --suite capacity --output deep.json": "deep.json is not a results file",
    "eval {run} --suite babilong --babilong-data no-such-data": "no-such-data",
    f"eval {LONG}": "cannot be opened",
    "eval runs/nope": "runs/nope does not exist",
    "eval ./nope": "./nope does not exist",
    "chat nope/": "nope/ does not exist",
    "audit runs/nope": "runs/nope does not exist",
    "attach runs/nope new": "runs/nope does not exist",
    "inspect {run} --text text.txt --device potato": "device='potato' is unknown",
    "inspect {run}": "needs --text",
    f"inspect {{run}} --text {LONG}": "File name too long",
    f"analyze {LONG}": "File name too long",
    "presets titan-mag": "did you mean titans-mag?",
    "presets --size": "'--size'",
    "data biuld": "'biuld' is not expected there; there are build, show",
    "data": "choose one of build, show",
    "data show text.txt --rows -1": "rows=-1 must be 0 or more",
    "data show text.txt --rows a": "--rows 'a' must be a whole number",
    "data build deep.json": "deep.json is not JSON",
    "tokenizer shwo": "'shwo' is not expected there; there are train, show",
    "tokenizer show text.txt": "is not a readable tokenizer.json",
    "tokenizer show .": "cannot open it: there is no tokenizer.json",
    "tokenizer train empty.txt": "empty.txt holds no text",
    "tokenizer train text.txt --vocab-size 99999999999": "vocab_size must be at most",
    "runs nope": "runs/nope is not a run",
    "ablate --task mqra": "task='mqra' is unknown; did you mean mqar?",
    "ablate --preset atls": "did you mean atlas?",
    "ablate --set hidden_size=[": "is not YAML",
    "demo --seconds nan": "seconds=nan must be > 0",
}


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: command[:70] or "nothing")
def test_a_mistake_is_one_line_and_a_status(run, capsys, command):
    words = command.format(run=run, runs=run.parent).split(" ") if command else []
    status = cli.main(words)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mnemos:")]
    assert status in (1, 2)
    assert MISTAKES[command] in lines[-1], lines
    assert len(lines) == 1 or "perplexity and length are left out" in lines[0]


def test_a_prompt_of_a_dash_is_read_from_standard_input(run, capsys, monkeypatch):
    for text in (b"hello\n", "grüße".encode(), b"\xff\xfe"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert cli.main(["generate", str(run), "--prompt", "-", "--max-tokens", "2"]) == 0
        begins = text.decode(errors="replace").strip("\n")
        assert capsys.readouterr().out.startswith(begins)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli.main(["generate", str(run), "--prompt", "-"]) == 2
    assert capsys.readouterr().err == "mnemos: prompt is empty: give at least one character\n"


def train(*flags: str) -> int:
    model = ("hidden_size=32", "num_hidden_layers=1", "memory={heads: 2}")
    quick = ("--preset", "titans-lmm", "--recipe", "debug", "--steps", "1", "--data", "text.txt", "--model.set", *model)
    return cli.main(["train", *quick, "--watch.no-display", *flags])


def test_a_run_is_found_where_output_dir_says(tmp_path, capsys):
    assert train("--output-dir", "runs/x") == 0
    assert (tmp_path / "runs" / "x" / "config.yaml").exists() and load_model("runs/x") is not None
    assert cli.main(["generate", "runs/x", "--max-tokens", "2"]) == 0
    assert train("--output-dir", "runs/x") == 2
    assert "runs/x holds a run already" in capsys.readouterr().err


def test_output_dir_beside_a_name_is_the_folder_that_holds_the_run(tmp_path):
    assert train("--output-dir=here", "--name", "y") == 0
    assert (tmp_path / "here" / "y" / "config.yaml").exists()


def test_a_run_is_not_resumed_with_another_model(run, capsys):
    before = (run / "config.yaml").read_text()
    assert cli.main(["train", "--resume", str(run), "--preset", "atlas"]) == 2
    assert "leave out --preset" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == before


def test_an_empty_prompt_for_samples_begins_a_document(tmp_path):
    assert train("--output-dir", "runs/z", "--watch.prompt", "") == 0
    assert json.loads((tmp_path / "runs" / "z" / "samples.jsonl").read_text())["step"] == 1


def test_copies_are_reported_with_the_data(tmp_path, capsys):
    (tmp_path / "copies.jsonl").write_text((json.dumps({"text": "the same " * 30}) + "\n") * 800)
    assert cli.main(["data", "build", "copies.jsonl"]) == 0
    assert "many of its documents are identical" in capsys.readouterr().out


def test_a_lack_of_memory_is_one_line(capsys, monkeypatch):
    def failing(error):
        def command(arguments):
            raise error

        monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("train", "", command, parses_arguments=True))
        return cli.main(["train"]), capsys.readouterr().err

    assert failing(MemoryError())[0] == 1
    assert failing(RuntimeError("DefaultCPUAllocator: can't allocate memory"))[1].startswith("mnemos: out of memory")
    with pytest.raises(RuntimeError, match="a bug"):
        failing(RuntimeError("a bug"))


def test_a_box_of_unicode_rules_becomes_a_sentence():
    box = "╭─ Unrecognized options ──╮\n│ Unrecognized options: -x │\n│ ──────── │\n│ For full helptext │\n╰────╯"
    assert sentence(box) == "there is no option -x"
