"""The suite `vitality`: the same text after more and more other text."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from oracles import BYTES

from mnemos.cli import main
from mnemos.eval import SUITES, EvalSettings, Evaluator, frozen_memory, run_suites, vitality_suite
from mnemos.eval.model_adapter import LanguageModel
from mnemos.eval.suites import Context
from mnemos.memory import distance_from_w0
from mnemos.memory.vitality import lowest_rank
from mnemos.models import MnemosForCausalLM, presets

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MEMORY = {"memory_heads": 2, "memory_chunk_size": 8}
IDS = np.random.default_rng(0).integers(97, 123, 3000)


def model_of(preset: str, **changes) -> MnemosForCausalLM:
    torch.manual_seed(0)
    memory = {} if presets.PRESETS[preset].memory is None else MEMORY
    return MnemosForCausalLM(
        presets.config(preset, attention_window=16, segment_length=16, **SMALL | memory | changes)
    ).eval()


def bits(model, ids, skip: int) -> float:
    ids = torch.from_numpy(ids)[None]
    labels = ids.clone()
    labels[:, : skip + 1] = -100
    with torch.no_grad():
        return model(ids, labels=labels).loss.item() / math.log(2)


@pytest.mark.parametrize("preset", ["titans-lmm", "titans-mac", "titans-mag", "deltanet"])
def test_bits_are_those_of_one_forward_over_both_texts(preset):
    model, text, other = model_of(preset), IDS[:100], IDS[100:]
    rows = vitality_suite(LanguageModel(model, BYTES, piece=64), None, text, other, [300, 0, 120], tokens=80)
    assert [row["length"] for row in rows] == [0, 120, 300] and rows[0]["tokens"] == 79
    for row in rows:
        n = row["length"]
        assert row["carried"] == pytest.approx(bits(model, np.concatenate([other[:n], text[:80]]), n), abs=1e-4)
        assert row["fresh"] == pytest.approx(bits(model, text[:80], 0), abs=1e-4)
        with frozen_memory(model):
            assert row["frozen"] == pytest.approx(bits(model, text[:80], 0), abs=1e-4)
    assert rows[0]["carried"] == pytest.approx(rows[0]["fresh"], abs=1e-6) and rows[1]["carried"] != rows[0]["carried"]
    assert rows[1]["state_bytes"] == rows[2]["state_bytes"]


def test_vitality_is_that_of_the_state_after_the_text():
    model, text, other = model_of("titans-lmm"), IDS[:100], IDS[100:]
    row = vitality_suite(model, BYTES, text, other, [200])[0]
    state = model.state(torch.from_numpy(np.concatenate([other[:200], text[:-1]]))[None])
    assert len(row["layers"]) == 2
    for layer, block, states in zip(row["layers"], model.model.layers, state.layers):
        assert layer["effective_rank"] == pytest.approx(lowest_rank(states["memory"]), rel=1e-3)
        moved = distance_from_w0(block.mixer.memory, states["memory"]).mean().item()
        assert layer["distance"] == pytest.approx(moved, rel=1e-3)
    for key in ("effective_rank", "distance", "relearning"):
        assert row[key] == pytest.approx(sum(layer[key] for layer in row["layers"]) / 2)


def test_a_network_that_forgets_towards_zero_is_seen_to_die():
    model = model_of("titans-lmm", memory_retention="zero", memory_retain_init=0.995)
    first, last = vitality_suite(model, BYTES, IDS[:64], IDS, [0, 3000])
    assert first["relearning"] > 0.3 and last["relearning"] < 0.05
    assert last["distance"] == pytest.approx(1.0, abs=0.01)


def test_other_text_that_is_too_short_repeats():
    model, text = model_of("deltanet"), IDS[:60]
    short = vitality_suite(model, BYTES, text, IDS[100:150], [140])[0]
    tiled = vitality_suite(model, BYTES, text, np.tile(IDS[100:150], 3), [140])[0]
    assert short["carried"] == pytest.approx(tiled["carried"], abs=1e-6)


@pytest.mark.parametrize("preset", ["transformer", "swa", "qk-mag", "dot"])
def test_a_model_without_a_finite_memory_is_told_in_one_sentence(preset):
    found = run_suites(model_of(preset), BYTES, ["vitality"], EvalSettings(text="a b c. " * 999))["suites"]["vitality"]
    assert (
        found["error"] == "vitality is not applicable: the model has no memory of fixed size that learns at test time"
    )


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"lengths": []}, "lengths=\\[\\] must be"),
        ({"lengths": [-1]}, "0 or more"),
        ({"tokens": 1}, "at least 2"),
        ({"other": ""}, "no tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(choices, words):
    with pytest.raises(ValueError, match=words):
        vitality_suite(model_of("deltanet"), BYTES, **{"text": "so it goes", "other": "and so on"} | choices)


def test_progress_counts_every_token_and_the_text_is_apart_from_the_other(tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    settings = EvalSettings(text=str(tmp_path / "t.txt"), stream_lengths=(0, 500), stream_text=128)
    context, counted = Context(LanguageModel(model_of("deltanet"), BYTES), settings), []
    rows = SUITES["vitality"].run(context, counted.append)
    assert sum(counted) == SUITES["vitality"].work(context) == 500 + 4 * 128
    ids = context.background(strict=False).ids
    expected = vitality_suite(context.lm, None, ids[-128:], ids[:-128], (0, 500), 128)
    assert rows == expected
    with pytest.raises(ValueError, match="smaller --stream-text"):
        SUITES["vitality"].run(Context(context.lm, EvalSettings(text=settings.text, stream_text=10**6)), None)


def test_the_command_writes_table_page_and_plot(tmp_path, text, capsys):
    model_of("titans-lmm").save_pretrained(tmp_path / "model")
    (tmp_path / "t.txt").write_text(text)
    command = ["eval", str(tmp_path / "model"), "--suite", "vitality", "--text", str(tmp_path / "t.txt")]
    command += ["--stream-lengths", "0", "400", "--stream-text", "64", "--plot", str(tmp_path / "v.svg")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "effective rank" in printed and "relearning" in printed and "vitality (" in printed
    rows = json.loads((tmp_path / "model" / "eval.json").read_text())["suites"]["vitality"]["rows"]
    assert [row["length"] for row in rows] == [0, 400] and len(rows[0]["layers"]) == 2
    assert (tmp_path / "v.svg").read_text().lstrip().startswith("<?xml")
    assert "relearning" in (tmp_path / "model" / "eval.html").read_text()


def test_the_evaluator_offers_it():
    rows = Evaluator(model_of("titans-lmm"), BYTES).vitality(
        "to be or not to be", "so it goes. " * 20, lengths=[0, 100]
    )
    assert [row["length"] for row in rows] == [0, 100]
