"""`mnemos inspect` and `mnemos analyze`."""

from __future__ import annotations

import json

from reporting import data_of

from mnemos.cli import main
from mnemos.train import export


def test_inspect_writes_a_page_into_the_run_and_prints_the_routing(run, text_file, capsys):
    assert main(["inspect", str(run), "--text", str(text_file), "--max-tokens", "80"]) == 0
    printed = capsys.readouterr().out
    assert "to memory" in printed and "relearning" in printed and "effective rank" in printed
    assert f"page: {run / 'inspect.html'}" in printed
    panel = data_of((run / "inspect.html").read_text())["panels"][0]
    assert len(panel["tokens"]) == 80 and panel["name"].startswith("first, step") and "is longer" in panel["notes"][0]


def test_inspect_shows_two_checkpoints_side_by_side(run, text_file, tmp_path, capsys):
    out = tmp_path / "two.html"
    arguments = ["inspect", str(run), "--text", str(text_file), "--max-tokens", "60", "--out", str(out)]
    assert main([*arguments, "--checkpoint", "4", "--against-checkpoint", "last"]) == 0
    panels = data_of(out.read_text())["panels"]
    assert [p["name"] for p in panels] == ["first, step 4", "first, step 12"]
    assert panels[0]["values"] != panels[1]["values"]


def test_inspect_compares_models_of_different_kinds(run, other_run, text_file, tmp_path):
    out = tmp_path / "two.html"
    arguments = ["inspect", str(run), "--against", str(other_run), "--text", str(text_file), "--out", str(out)]
    assert main([*arguments, "--max-tokens", "60"]) == 0
    assert {"mag", "mal"} == {p["layers"][0]["kind"] for p in data_of(out.read_text())["panels"]}


def test_inspect_opens_what_export_wrote(run, text_file, tmp_path):
    out = export(run, tmp_path / "exported", "last")
    assert main(["inspect", str(out), "--text", str(text_file), "--max-tokens", "40"]) == 0
    panel = data_of((out / "inspect.html").read_text())["panels"][0]
    assert panel["name"] == "exported" and len(panel["tokens"]) == 40


def test_analyze_prints_findings_and_writes_a_page(run, other_run, tmp_path, capsys):
    out = tmp_path / "page.html"
    arguments = ["analyze", str(run), str(other_run), "--tokens", "32", "--generate", "2", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"page: {out}" in printed and "first: titans-mag nano" in printed
    assert main([*arguments[:2], "--no-checkpoints", "--json", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(json.loads(line)["level"] in ("bad", "warn", "note") for line in lines)


def test_what_is_wrong_is_one_sentence(run, tmp_path, text_file, capsys):
    cases = {
        "is not a file": ["inspect", str(run), "--text", str(tmp_path / "none.txt")],
        "checkpoint='99'": ["inspect", str(run), "--text", str(text_file), "--checkpoint", "99"],
        "is not a folder": ["inspect", str(run), "--text", str(text_file), "--out", str(tmp_path / "no" / "x.html")],
        "is a folder": ["analyze", str(run), "--no-checkpoints", "--out", str(tmp_path)],
        "no config.yaml": ["analyze", str(tmp_path)],
    }
    for words, arguments in cases.items():
        assert main(arguments) == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert told.startswith("mnemos: ") and words in told, told
