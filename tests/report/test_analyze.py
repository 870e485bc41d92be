"""`analyze`: a run's record and its checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest
from reporting import TEXT, data_of

from mnemos.data.held_out import held_out_text
from mnemos.report import analyze, analyze_page
from mnemos.report.analyze import POINTS, _thinned
from mnemos.train import Trainer, load_model, load_tokenizer
from small import small


def test_every_checkpoint_reads_the_text_and_continues_the_prompt(run, tokenizer):
    found = analyze(run, TEXT, tokens=64, generate=5)
    assert [r.step for r in found.readings] == [4, 8, 12]
    assert all(set(r.perplexity) == {"learning", "frozen", "off"} for r in found.readings)
    assert all(r.sample.startswith("the") and len(tokenizer.encode(r.sample)) >= 4 for r in found.readings)
    start = load_model(run, "8").model.layers[1].mixer.memory.W0[0].flatten(1).norm(dim=-1).mean().item()
    assert found.readings[1].layers[1]["maps"][0]["start"] == pytest.approx(start, rel=1e-4)
    assert found.readings[0].layers[0]["maps"][1]["end"] > found.readings[0].layers[0]["maps"][1]["start"]
    assert found.summary["step"] == 12 and found.samples and found.records["probe"]


def test_the_record_alone_needs_no_checkpoint(run, tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(run / name, tmp_path / name)
    found = analyze(tmp_path)
    assert found.readings == [] and found.text == "" and len(found.records["train"]) == 12
    assert analyze(run, checkpoints=False).readings == []


def test_a_damaged_checkpoint_is_named_and_the_others_are_read(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step-000008" / "state.json").write_text("{}")
    found = analyze(copy, TEXT, tokens=32, generate=0)
    assert [r.step for r in found.readings] == [4, 12]
    assert found.findings[0].title == "Checkpoint step-000008 is damaged"


def test_a_sample_cut_off_by_a_crash_is_left_out(run, tmp_path):
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(run / name, tmp_path / name)
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 3, "text": "so"}) + '\n{"step": 4, "te')
    assert analyze(tmp_path).samples == [{"step": 3, "text": "so"}]


def test_the_page_holds_every_run_and_no_markup(run, other_run, tmp_path):
    first = analyze(run, TEXT, tokens=32, generate=3)
    first.samples.append({"step": 1, "text": "</script><b>bold</b>"})
    page = analyze_page([first, analyze(other_run, TEXT, tokens=32, generate=3)])
    assert "<b>" not in page and page.count("</script>") == 2
    runs = data_of(page)["runs"]
    assert [r["name"] for r in runs] == ["first", "second"]
    assert runs[0]["samples"][-1]["text"] == "</script><b>bold</b>"
    assert [r["step"] for r in runs[1]["readings"]] == [4, 8]


def test_a_long_record_is_thinned_and_keeps_its_end():
    rows = [{"step": i} for i in range(10 * POINTS + 7)]
    kept = _thinned(rows)
    assert len(kept) <= POINTS and kept[-1] == rows[-1] and _thinned(rows[:5]) == rows[:5]


def test_what_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(ValueError, match="no config"):
        analyze(tmp_path)
    with pytest.raises(ValueError, match="tokens=1"):
        analyze(run, tokens=1)
    with pytest.raises(ValueError, match="at least one"):
        analyze_page([])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_run_reads_the_text_that_it_held_out(tmp_path, tokenizer):
    config = small(tmp_path, steps=2, data={"tokenizer": tokenizer, "packing": "documents"}, checkpoint={"every": 2})
    trainer = Trainer(config)
    trainer.train()
    rows = next(iter(trainer.data.validation))["input_ids"]
    held_out = {trainer.data.tokenizer.decode(row.tolist()) for row in rows}
    text = held_out_text(config.data, load_tokenizer(trainer.path), 40)
    assert text and any(text[:20].strip() in row for row in held_out)
    said = []
    found = analyze(trainer.path, tokens=30, generate=0, say=said.append)
    assert found.text == "the first 30 tokens of the run's held-out text" and len(said) == 1
    assert found.readings[0].perplexity == analyze(trainer.path, text, 30, 0).readings[0].perplexity


def test_without_its_shards_a_run_reads_another_text_and_says_so(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("words.txt", "gone.txt"))
    said = []
    found = analyze(copy, tokens=30, generate=0, say=said.append)
    assert "is not in the cache: reading Python's own documentation" in said[0]
    assert found.text == "the first 30 tokens of Python's own documentation"
    assert not (tmp_path / "cache").exists()
