"""What `mnemos generate` refuses, before it opens a model; and files that cannot be written."""

from __future__ import annotations

import errno

import pytest

from mnemos import cli


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--max-tokens", "0"], "max_tokens=0 must be at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 must be 0 or more"),
        (["--temperature", "nan"], "temperature=nan must be 0 or more"),
        (["--top-k", "-1"], "top_k=-1 must be 0 or more"),
        (["--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--samples", "0"], "samples=0 must be at least 1"),
        (["--device", "potato"], "device='potato' is unknown; use auto, cpu, cuda or cuda:0"),
        ([], "no-such-run is neither a run (config.yaml) nor an exported model (config.json)"),
    ],
)
def test_what_is_wrong_is_one_sentence(capsys, flags, sentence):
    assert cli.main(["generate", "no-such-run", *flags]) == 2
    assert capsys.readouterr().err == f"mnemos: {sentence}\n"


def test_a_file_that_cannot_be_written_is_one_sentence(capsys, monkeypatch):
    def full(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/config.yaml")

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("train", "", full, parses_arguments=True))
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "mnemos: runs/a/config.yaml cannot be written: No space left on device\n"
