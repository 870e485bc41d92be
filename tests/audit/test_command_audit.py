"""`mnemos audit`: models of every kind, exit status, table, JSON and page."""

from __future__ import annotations

import json

import pytest
from small_models import attached, llama, preset

from mnemos.cli import main
from mnemos.cli.commands import COMMANDS

FILE = """
import torch
from mnemos.data import ByteTokenizer

def healthy():
    return (lambda input_ids: torch.eye(256)[input_ids]), ByteTokenizer()

def peeks():
    return lambda input_ids: torch.eye(50)[input_ids.roll(-1, 1)]

def raises():
    def model(input_ids):
        if input_ids.shape[1] > 8:
            raise RuntimeError("too long for me\\nsecond line")
        return torch.eye(50)[input_ids]
    return model

def stops():
    calls = []
    def model(input_ids):
        calls.append(input_ids)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return torch.eye(50)[input_ids]
    return model

def needs_sizes(sizes): ...
def no_model(): return "a name"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a module of models; what it defines is imported by its path alone."""
    name = f"models_of_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return f"./{name}.py"


def test_the_exit_status_says_whether_something_failed(place, capsys):
    assert main(["audit", f"{place}:healthy", "--length", "16", "--samples", "8"]) == 0
    printed = capsys.readouterr().out
    assert "0 fail" in printed and "prompts" in printed
    assert main(["audit", f"{place}:peeks", "--length", "16", "--checks", "splits,state"]) == 1
    printed = capsys.readouterr().out
    assert "1 pass, 1 fail, 3 not applicable" in printed
    assert f"mnemos audit {place}:peeks --checks causality --length 16" in printed
    assert "logits of token 0 change with tokens from 1 on" in printed


def test_the_command_of_a_fault_shows_the_fault(place, capsys, tmp_path):
    assert main(["audit", f"{place}:peeks", "--length", "16", "--seed", "3", "--json", "a.json"]) == 1
    found = json.loads((tmp_path / "a.json").read_text())
    wrong = next(row for row in found["checks"] if row["status"] == "fail")
    assert found["format"] == "mnemos.audit/1" and not found["ok"]
    assert main([*wrong["command"].split()[1:], "--json", "b.json"]) == 1
    again = json.loads((tmp_path / "b.json").read_text())["checks"]
    assert wrong["text"] == next(row for row in again if row["check"] == wrong["check"])["text"]


def test_an_exception_of_the_model_is_a_fault_with_its_first_line(place, capsys):
    assert main(["audit", f"{place}:raises", "--length", "16", "--checks", "calls"]) == 1
    assert "the model raised RuntimeError: too long for me" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{file}:needs_sizes"], "must be a function without arguments, but needs sizes"),
        (["{file}:no_model"], "returns a str, but must return a model, or a model and a tokenizer"),
        (["{file}:missing"], "has no function missing"),
        (["nosuchmodule:make"], "there is no module nosuchmodule"),
        (["{file}:peeks", "--checks", "causalty"], "check 'causalty' is unknown; did you mean causality?"),
        (["{file}:peeks", "--checks", ","], "name at least one check"),
        (["{file}:peeks", "--length", "4"], "length=4 must be at least 8"),
        (["{file}:peeks", "--state", "small"], "state='small' is unknown; choose one of auto, constant, linear"),
        (["{file}:peeks", "--html", "no/page.html"], "give a file in a folder that exists"),
        (["{file}:peeks", "--prompts", "nothing"], "is not a file"),
        (["{file}:peeks", "--prompts", "bad.jsonl"], 'bad.jsonl:2 must be an object with "prompt" and "answer"'),
        (["{file}:peeks", "--checkpoint", "best"], "checkpoint and allow_missing are for runs and folders"),
    ],
)
def test_a_wrong_usage_is_one_sentence_and_exit_status_2(place, arguments, sentence, capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n[]\n')
    assert main(["audit", *(word.format(file=place) for word in arguments)]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


def test_a_module_of_the_working_folder_is_not_found_by_its_name(place, capsys):
    """Only an explicit path runs a file of the working folder."""
    assert main(["audit", f"{place[2:-3]}:healthy"]) == 2
    assert "there is no module" in capsys.readouterr().err


def test_a_folder_with_code_is_not_run(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: ...\n")
    assert main(["audit", str(folder)]) == 2
    assert not (tmp_path / "was_run").exists() and capsys.readouterr().err.count("\n") == 1


def test_saved_models_of_every_kind_are_audited(tmp_path, capsys):
    from mnemos.attach import save_merged

    llama().save_pretrained(tmp_path / "llama")
    preset("titans-mag").save_pretrained(tmp_path / "ours")
    save_merged(attached(window=8, sinks=2), tmp_path / "attached")
    for name in ("llama", "ours", "attached"):
        command = ["audit", str(tmp_path / name), "--length", "24", "--checks", "splits,memory"]
        assert main(command) == 0, capsys.readouterr().out
        printed = capsys.readouterr().out
        assert "texts of 24 tokens" in printed
        memory = next(line for line in printed.splitlines() if line.lstrip().startswith("memory "))
        assert ("not applicable" in memory) == (name == "llama")


def test_an_interrupted_audit_keeps_what_is_finished(place, tmp_path, capsys):
    assert main(["audit", f"{place}:stops", "--length", "16", "--json", "a.json", "--html", "a.html"]) == 130
    printed = capsys.readouterr().out
    assert "1 pass, 0 fail, 0 not applicable" in printed and "interrupted, not finished: causality, loss" in printed
    found = json.loads((tmp_path / "a.json").read_text())
    assert not found["ok"] and [row["check"] for row in found["checks"]] == ["calls"]
    assert found["unfinished"][0] == "causality" and len(found["unfinished"]) == 12
    assert "Interrupted; not finished: causality, loss" in (tmp_path / "a.html").read_text()


def test_a_row_is_printed_when_its_check_is_finished(place, capsys):
    """A slow check in plain output: the rows before it are there, and lines name its parts."""
    from mnemos.audit.runner import run
    from mnemos.cli import audit_screen

    printed: list[str] = []

    class Screen(audit_screen.AuditScreen):
        def running(self, check):
            super().running(check)
            self.said -= 2 * audit_screen.EVERY  # as if the check had worked for a minute
            printed.append(capsys.readouterr().out)

    with Screen() as screen:
        run(llama(), length=16, checks=["cached"], watch=screen)
    assert printed[1].splitlines()[-2].split()[:2] == ["calls", "pass"]
    assert "check 3 of 3: cached, part 1 of at most 6" in capsys.readouterr().err


def test_the_page_has_every_check_and_no_script(place, tmp_path, capsys):
    assert main(["audit", f"{place}:peeks", "--length", "16", "--html", "page.html"]) == 1
    page = (tmp_path / "page.html").read_text()
    assert "Page: page.html" in capsys.readouterr().out
    assert "<script" not in page and page.count('data-name="verdict"') == 13


def test_the_command_is_listed():
    assert "audit" in COMMANDS and COMMANDS["audit"].about.startswith("Test any causal language model")
