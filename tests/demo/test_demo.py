"""`mnemos demo`: its questions have answers, its measurements know right from wrong, and its page stands alone."""

from __future__ import annotations

import html
import importlib.util
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from mnemos.cli import main
from mnemos.demo import DemoPlan, run, training
from mnemos.demo.facts import PEOPLE, THINGS, VOCABULARY, facts, lesson, pair_ids, word
from mnemos.demo.measure import bits_per_byte, recall_by_distance, save_and_load
from mnemos.demo.results import FULL_ATTENTION, WINDOW_ONLY, WITH_MEMORY, example_of
from mnemos.demo.shown import bar
from mnemos.demo.training import Curriculum, Curve, train
from mnemos.models import MnemosForCausalLM, presets
from mnemos.report.charts import Line, Mark, chart

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, np.uint8)
SMALL = DemoPlan(
    curriculum=Curriculum(rows=2, pairs=4, gap=(8, 16), longest=24, max_steps=30),
    width=16,
    heads=1,
    window=4,
    baseline_window=8,
    text_characters=40_000,
    rows=2,
    distances=(4, 32, 64, 200),
    attention_distances=(4, 32, 64),
)


def small_model(**changes) -> MnemosForCausalLM:
    torch.manual_seed(0)
    config = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "memory_heads": 1} | changes
    return MnemosForCausalLM(presets.config("titans-lmm", "nano", **config)).eval()


def test_every_question_has_its_answer_among_the_facts_and_text_holds_none():
    made = lesson(TEXT, rows=5, pairs=6, gap=20, rng=np.random.default_rng(0))
    assert made.ids.shape == (5, 6 * 2 + 20 + 6 * 2)
    for row, text, answer in zip(made.ids.tolist(), made.of_text.tolist(), made.of_answer.tolist()):
        known = dict(zip(row[0:12:2], row[1:12:2]))
        assert len(known) == 6 and {word(p) for p in known} <= set(PEOPLE)
        assert all(token < 256 for token in row[12:32])
        asked = dict(zip(row[32::2], row[33::2]))
        assert asked == known
        assert [i for i, is_answer in enumerate(answer) if is_answer] == list(range(33, 44, 2))
        assert [i for i, is_text in enumerate(text) if is_text] == list(range(13, 32))


def test_words_are_all_different():
    assert len({*PEOPLE, *THINGS}) == VOCABULARY - 256


def test_too_many_facts_are_refused():
    with pytest.raises(ValueError, match=r"pairs=33 must lie in 1\.\.32"):
        facts(1, 33, np.random.default_rng(0))


class Oracle(MnemosForCausalLM):
    """Remembers facts by itself, or always says the same."""

    def __init__(self, knows: bool):
        super().__init__(small_model().config)
        self.knows, self.known = knows, []

    def state(self, ids, cache=None):
        if cache is None:
            self.known = [dict(zip(row[::2], row[1::2])) for row in ids.tolist()]
        return super().state(ids, cache)

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        share = len(input_ids) // len(self.known)
        for i, person in enumerate(input_ids[:, -1].tolist()):
            right = self.known[i // share][person] if self.knows else 256 + len(PEOPLE)
            out.logits[i, -1] = torch.nn.functional.one_hot(torch.tensor(right), VOCABULARY).float()
        return out


def test_recall_is_one_for_an_oracle_and_chance_for_a_constant():
    for knows in (True, False):
        found = [a for a, _ in recall_by_distance(Oracle(knows), TEXT, (3, 40), rows=8, pairs=16, seed=0)]
        assert [a.distance for a in found] == [3, 40]
        right = (found[0].right == 256 + len(PEOPLE)).double().mean().item()
        assert found[0].recall == found[1].recall == (1.0 if knows else right)
        assert right < 0.1


def test_asking_in_between_does_not_disturb_the_reading():
    model = small_model()
    often = [a for a, _ in recall_by_distance(model, TEXT, (10, 50, 90), rows=2, pairs=4, seed=0)]
    once = [(a, cache) for a, cache in recall_by_distance(model, TEXT, (90,), rows=2, pairs=4, seed=0)]
    assert torch.equal(often[-1].answers, once[0][0].answers)
    assert often[0].state_bytes == often[-1].state_bytes == once[0][1].nbytes // 2


def test_what_is_told_is_read_in_the_order_of_training():
    people, things = facts(1, 3, np.random.default_rng(1))
    assert pair_ids(people, things)[0, :2].tolist() == [people[0, 0].item(), things[0, 0].item()]


def test_saving_and_loading_changes_nothing(tmp_path):
    model = small_model()
    [(asked, cache)] = recall_by_distance(model, TEXT, (30,), rows=2, pairs=4, seed=0)
    kept = save_and_load(model, cache, asked, tmp_path / "facts.safetensors")
    assert kept.largest_difference == 0 and kept.before == kept.after == asked.recall
    assert kept.file_bytes == (tmp_path / "facts.safetensors").stat().st_size


def test_bits_per_byte_of_a_model_that_knows_nothing_are_those_of_its_vocabulary():
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert bits_per_byte(model, TEXT, 3, 2, 20, 0) == pytest.approx(np.log2(VOCABULARY), rel=1e-5)


def test_bits_per_byte_are_of_text_where_training_had_it_behind_facts():
    read = []

    def model(ids, use_cache):
        read.append(ids)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(ids.roll(-1, 1), VOCABULARY) * 100.0)

    assert bits_per_byte(model, TEXT, 3, 2, 20, 0) == pytest.approx(0, abs=1e-6)
    assert read[0].shape == (3, 2 * 2 + 20 + 2 * 2) and bool((read[0][:, :4] >= 256).all())


def test_all_models_have_one_size_and_only_one_has_a_memory():
    plan = DemoPlan()
    sizes = {name: presets.count(plan.config(name)) for name in (WITH_MEMORY, WINDOW_ONLY, FULL_ATTENTION)}
    assert max(sizes.values()) - min(sizes.values()) < 0.01 * sizes[WITH_MEMORY]
    assert [plan.config(name).has_memory for name in sizes] == [True, False, False]
    assert [plan.config(name).blocks[0] for name in sizes] == ["mag", "swa", "attention"]
    assert plan.memory_config().attention_window < plan.window_config().attention_window == plan.baseline_window
    assert all(plan.config(name).attention_conv_width for name in (WINDOW_ONLY, FULL_ATTENTION))


def test_there_are_enough_questions_at_every_distance_up_to_100_000_tokens():
    plan = DemoPlan()
    assert plan.questions >= 128 and max(plan.distances) == 100_000
    assert {*plan.attention_distances} < {*plan.distances}


def test_training_stops_at_its_time_and_learns_text(monkeypatch):
    clock = itertools.count(0.0, 0.02)  # a step of any machine takes a fiftieth of a second
    monkeypatch.setattr("mnemos.demo.training.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    curriculum = Curriculum(rows=2, pairs=2, gap=(16, 24), lr=1e-2)
    curve = train(small_model(), TEXT, curriculum, seconds=3)
    assert curve.text_loss[-1] < curve.text_loss[0] - 0.5 and not curve.reached and curve.grew_at is None
    assert curve.steps == 150 and curve.seconds == pytest.approx(3.0, abs=0.021)


def test_the_gap_grows_when_recall_is_ready_and_training_ends_soon_after_its_goal():
    curriculum = Curriculum(
        rows=2, pairs=2, gap=(2, 4), longest=64, growth=2.0, ready=-1.0, goal=-1.0
    )  # both as soon as there is an average
    curve = train(small_model(), TEXT, curriculum)
    assert curve.grew_at == 20 and curve.reached
    assert curve.steps == 30  # 20 until it grows, 4 until the longest, then a fifth of all to come down
    assert [Curve([0.0] * n, grew_at=20).longest(curriculum) for n in (19, 20, 22, 99)] == [4, 4, 16, 64]


def test_a_training_that_does_not_learn_ends_after_its_most_steps_and_says_so():
    fractions = []
    curriculum = Curriculum(rows=2, pairs=2, gap=(2, 4), longest=8, max_steps=25)
    curve = train(small_model(), TEXT, curriculum, progress=lambda done, _: fractions.append(done))
    assert curve.steps == 25 and not curve.reached and curve.grew_at is None
    assert fractions[-1] == 1.0 and max(fractions[:19]) <= 0.5


def test_batches_have_distances_on_a_logarithmic_scale_and_about_one_size():
    curriculum, curve = Curriculum(), Curve([1.0] * 500, grew_at=0)
    rng = np.random.default_rng(0)
    made = [training._batch(TEXT, curriculum, curve, rng).ids.shape for _ in range(300)]
    lengths = [length for _, length in made]
    assert 0.3 < sum(length < 80 for length in lengths) / 300 < 0.75 and max(lengths) > 800
    assert all(rows == 32 or rows * length < 5000 for rows, length in made)


def test_the_other_model_gets_the_same_batches(monkeypatch):
    seen = []

    def recorded(*args):
        made = lesson(*args)
        seen.append(made.ids)
        return made

    monkeypatch.setattr(training, "lesson", recorded)
    curriculum = Curriculum(rows=2, pairs=3, gap=(2, 4), longest=10, ready=-1.0, goal=-1.0)
    first = train(small_model(), TEXT, curriculum)
    mine, seen[:] = list(seen), []
    second = train(small_model(hidden_size=8), TEXT, curriculum, first)
    assert second.steps == first.steps == len(mine) and second.grew_at == first.grew_at
    assert all(torch.equal(a, b) for a, b in zip(mine, seen))


class Tags(HTMLParser):
    """Collects what a page refers to, and checks that its tags close."""

    VOID = frozenset({"meta", "line", "circle", "polyline", "br", "rect"})

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.charts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "data")]
        self.charts += tag == "svg"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag


@torch.no_grad()
def test_the_baseline_has_a_convolution_and_reaches_back_exactly_as_far_as_it_says():
    torch.manual_seed(0)
    model, ids, t = MnemosForCausalLM(SMALL.window_config()).double().eval(), torch.arange(60)[None], 20
    assert model.config.attention_conv_width == 4 and SMALL.reach == 2 * (7 + 3)
    changed = ids.clone()
    changed[0, t] = 200
    differs = (model(ids).logits != model(changed).logits).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(t, t + SMALL.reach + 1))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """The report of a small run, and what it printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MNEMOS_CACHE", str(tmp_path_factory.mktemp("cache")))
        report = run(tmp_path_factory.mktemp("demo") / "demo", SMALL, Console(file=printed, width=160))
    return report, printed.getvalue()


def test_a_small_run_measures_every_model_at_its_distances(small_run):
    report, text = small_run
    data = json.loads(report.data.read_text())
    assert [r["distance"] for r in data["recall"]["memory"]] == [4, 32, 64, 200]
    assert [r["distance"] for r in data["recall"]["full attention"]] == [4, 32, 64]
    (size,) = {r["state_bytes"] for r in data["recall"]["memory"]}
    each = (
        SMALL.layers * 2 * SMALL.width * 4
    )  # bytes of a token's keys and values; the convolution's tail does not grow
    held = [r["state_bytes"] for r in data["recall"]["full attention"]]
    assert held[2] - held[1] == 32 * each and f"keeps {each:,} bytes for every token" in text
    assert data["saved"]["largest_difference"] == 0 and data["questions"] == 8
    steps = {len(training["recall"]) for training in data["training"].values()}
    assert steps == {report.curves["memory"].steps} == {30}
    assert f"{size:,}" in text and "has not reached a recall of 95%" in text
    for asked in report.recall["memory"]:
        assert f"{asked.recall:.0%}" in text


def test_the_demo_shows_a_fact_the_text_the_question_and_every_answer(small_run):
    report, text = small_run
    example = example_of(report.recall, 64)
    (person, thing), *_ = example.facts
    held_out = training.training_text(SMALL.text_characters)[1].tobytes().decode()
    assert example.text[:30] in " ".join(held_out.split()) and set(example.answers) == {*report.recall}
    page = report.page.read_text()
    told = text.replace("\n", " ")
    for shown in (f"{person} {thing}", f"{person}?"):
        assert shown in told and shown in html.unescape(re.sub("<[^>]+>", "", page))
    shown = example_of(report.recall, 200)  # the distance of the example in the page: the first far beyond the reach
    assert "full attention" not in shown.answers
    assert all(f"<td>{name}</td><td>{fact}</td>" in page for name, fact in shown.facts)


def test_the_page_stands_alone_and_the_run_ends_with_a_picture_of_recall(small_run):
    report, text = small_run
    page = report.page.read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.charts == 3 and tags.addresses == []
    assert "http:" not in page and "https:" not in page and "nan" not in page.lower().replace("nano", "")
    end = text[text.rindex("Recall by distance") :]
    assert str(report.page.resolve()) in end and f"{bar(report.recall['memory'][0].recall)} " in end
    assert end.count("not asked") == 1 and "8 questions at every distance" in end


def test_a_chart_puts_points_where_they_belong():
    drawn = chart([Line("a", [1, 10, 100], [0, 0.5, 1])], "x", "y", (0, 1), log="x", marks=[Mark("here", x=10)])
    dots = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    assert dots[1][0] == pytest.approx((dots[0][0] + dots[2][0]) / 2, abs=0.1)
    assert dots[1][1] == pytest.approx((dots[0][1] + dots[2][1]) / 2, abs=0.1)
    assert dots[0][1] > dots[2][1] and "here" in drawn


def test_names_stand_beside_the_lines_in_their_colours_and_apart():
    lines = [Line("first", [1, 2], [0, 0.5], 3), Line("second <b>", [1, 2], [0.1, 0.5], 5)]
    drawn = chart(lines, "x", "y", (0, 1), marks=[Mark("guessing", y=0.5)])
    names = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)"(?: class="name" style="fill: var\(--c(\d)\)")?>(\w[^<]*)', drawn
    )
    beside = {name: (float(y), place) for x, y, place, name in names if float(x) > 388}  # the axis ends at 388
    assert (
        beside["first"][1] == "3"
        and beside["second &lt;b&gt;"][1] == "5"
        and "guessing" in beside
        and "<b>" not in drawn
    )
    heights = sorted(y for y, _ in beside.values())
    assert all(b - a >= 15 for a, b in zip(heights, heights[1:]))


def test_the_command_refuses_no_time(capsys):
    assert main(["demo", "--seconds", "0"]) == 2
    assert "seconds=0.0 must be > 0" in capsys.readouterr().err


def test_the_example_prints_what_was_measured(capsys):
    path = Path(__file__).parents[2] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo_example", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = {"memory": [SimpleNamespace(distance=4096, recall=0.875)], "window only": [SimpleNamespace(recall=0.03)]}
    example.run = lambda folder: SimpleNamespace(recall=found)
    example.main()
    assert capsys.readouterr().out == "4,096 tokens after the facts: 88% with a memory, 3% without\n"
