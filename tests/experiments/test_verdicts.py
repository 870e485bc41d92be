"""From rows to tables, pictures and verdicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from driver import pivot, plots, verdicts
from driver.experiment import find
from driver.page import claims_table
from driver.plots import dots, draw, finding, points
from driver.tables import tuned
from driver.verdicts import FAILS, HOLDS, NOISE, OPEN
from mnemos.colours import colour

ROWS = [
    {"model": model, "lr": lr, "seed": seed, "x": x}
    for model, lr, xs in (("a", 1, (0.5, 0.6)), ("a", 2, (0.9, 0.8)), ("b", 1, (0.3, 0.2)), ("b", 2, (0.1, 0.1)))
    for seed, x in enumerate(xs)
]
NAMES = ["model", "lr", "seed"]


def test_the_learning_rate_is_tuned_per_point_by_the_mean_over_seeds():
    assert [row["x"] for row in tuned(ROWS, NAMES, "lr", "x", lower=False)] == [0.9, 0.8, 0.3, 0.2]
    assert [row["x"] for row in tuned(ROWS, NAMES, "lr", "x", lower=True)] == [0.5, 0.6, 0.1, 0.1]
    lucky = [*ROWS, {"model": "a", "lr": 3, "seed": 0, "x": 1.0}]  # one seed of a rate that others have two of
    assert [row["x"] for row in tuned(lucky, NAMES, "lr", "x", lower=False)][:2] == [0.9, 0.8]


def test_columns_that_are_words_stand_as_they_were_run_and_numbers_by_size():
    rows = [{"model": "a", "size": size, "n": n, "x": 1} for size, n in (("340m", 10), ("1.3b", 9))]
    table = {"rows": "model", "value": "x"}
    assert pivot(rows, [], table | {"columns": "size"})[0] == ["model \\ size", "340m", "1.3b"]
    assert pivot(rows, [], table | {"columns": "n"})[0] == ["model \\ n", "9", "10"]


def test_a_table_has_means_with_intervals_and_dashes():
    header, lines = pivot(ROWS, NAMES, {"rows": "model", "columns": "lr", "value": "x", "where": {"seed": [0, 1]}})
    assert header == ["model \\ lr", "1", "2"] and lines[0][1].startswith("0.550 ± ")
    header, lines = pivot(
        [*ROWS, {"model": "c", "x": 1.0}], NAMES, {"rows": "model", "values": ["x", "y"], "best": "lr"}
    )
    assert header == ["model", "x", "y"] and lines[2] == ["c", "1.000", "–"] and lines[0][1].startswith("0.850")


def test_columns_of_one_line_are_those_of_one_learning_rate():
    rows = [{"model": "a", "lr": lr, "seed": 0, "x": x, "seconds": t} for lr, x, t in ((1, 0.9, 50), (2, 0.5, 99))]
    assert pivot(rows, ["model", "lr", "seed"], {"rows": "model", "values": ["x", "seconds"], "best": "lr"})[1] == [
        ["a", "0.900", "50"]
    ]


def claim(**fields):
    return verdicts(ROWS, NAMES, [{"text": "t", "value": "x"} | fields])[0]


def test_claims_are_judged_by_paired_differences():
    three = [
        {"model": m, "seed": s, "x": x}
        for m, xs in (("a", (1, 2, 3)), ("b", (0.5, 1.4, 2.6)))
        for s, x in enumerate(xs)
    ]

    def judged(better, worse, **more):
        return verdicts(
            three,
            ["model", "seed"],
            [{"text": "t", "value": "x", "better": {"model": better}, "worse": {"model": worse}} | more],
        )[0]

    assert judged("a", "b").found == HOLDS and "+0.500" in judged("a", "b").numbers
    assert judged("b", "a").found == FAILS and judged("b", "a", lower=True).found == HOLDS
    assert judged("a", "c").found == OPEN
    noisy = [
        {"model": m, "seed": s, "x": x} for m, xs in (("a", (1, 2, 3)), ("b", (0, 3, 2))) for s, x in enumerate(xs)
    ]
    compared = {"text": "t", "value": "x", "better": {"model": "a"}, "worse": {"model": "b"}}
    assert verdicts(noisy, ["model", "seed"], [compared])[0].found == NOISE
    single = [{"model": "a", "x": 0.54}, {"model": "b", "x": 0.5}]
    assert verdicts(single, ["model"], [compared])[0].found == NOISE
    single[0]["x"] = 0.6
    assert verdicts(single, ["model"], [compared])[0].found == HOLDS


def test_one_seed_may_claim_no_more_than_seeds_differ_by():
    def judged(value, a, b):
        rows = [{"model": "a", "seed": 0, value: a}, {"model": "b", "seed": 0, value: b}]
        compared = {"text": "", "value": value, "better": {"model": "a"}, "worse": {"model": "b"}}
        return verdicts(rows, ["model", "seed"], [compared])[0].found

    assert judged("bits", 2.6, 2.5) == HOLDS and judged("bits", 2.54, 2.5) == NOISE
    assert judged("accuracy@1000", 0.594, 0.5) == NOISE  # 64 answers; of MQAR three seeds of one model are 0.22 apart
    assert judged("recall@16000", 0.96, 0.03) == HOLDS


def test_levels_must_be_reached_by_all_that_are_named():
    assert claim(of={"model": ["a", "b"]}, at_least=-0.5, best="lr").found == HOLDS
    assert claim(of={"model": ["a", "b"]}, at_least=0.9, best="lr").found == FAILS  # a may be there, b is not
    assert claim(of={"model": ["a", "z"]}, at_least=0.1).found == OPEN
    assert claim(of={"model": "b"}, at_most=0.9).found == HOLDS
    assert claim(better={"lr": 2}, worse={"lr": 1}, where={"model": "a"}).found == NOISE  # two pairs, 0.4 and 0.2 apart


def test_a_level_must_be_reached_at_every_point():
    rows = [{"model": "a", "size": size, "seed": 0, "x": x} for size, x in ((1, 0.5), (2, 1.5))]
    [found] = verdicts(
        rows, ["model", "size", "seed"], [{"text": "", "value": "x", "of": {"model": "a"}, "at_least": 0.9}]
    )
    assert (found.found, found.numbers) == (FAILS, "a 0.500 (n = 1)")


def test_seeds_that_diverged_are_told_and_not_averaged_away():
    """One lucky seed of three is no result, in a table or for a claim."""
    rows = [{"model": "a", "seed": 0, "x": 0.99}, *({"model": "a", "seed": s, "diverged": 1} for s in (1, 2))]
    rows += [{"model": "b", "seed": s, "x": 0.6} for s in range(3)]
    rows += [{"model": "c", "seed": s, "x": None} for s in range(3)]  # what JSON makes of NaN
    varying, table = ["model", "seed"], {"rows": "model", "values": ["x"]}
    wanted = [["a", "0.990 (2 of 3 diverged)"], ["b", "0.600 ± 0.000"], ["c", "diverged"]]
    assert pivot(rows, varying, table)[1] == wanted
    columns = pivot([row | {"size": 1} for row in rows], varying, {"rows": "model", "columns": "size", "value": "x"})
    assert columns[1] == wanted

    def judged(better, worse):
        compared = {"text": "", "value": "x", "better": {"model": better}, "worse": {"model": worse}}
        return verdicts(rows, varying, [compared])[0]

    assert (judged("a", "b").found, judged("a", "b").numbers) == (FAILS, "2 against 0 diverged")
    assert judged("b", "a").found == FAILS and judged("b", "a").numbers.endswith("; 0 against 2 diverged")
    assert judged("b", "c").found == HOLDS and judged("c", "b").found == FAILS
    assert judged("z", "c").found == OPEN and judged("c", "z").found == OPEN
    level = {"text": "", "value": "x", "of": {"model": ["a", "b"]}, "at_least": 0.5}
    [found] = verdicts(rows, varying, [level])
    assert (found.found, found.numbers) == (FAILS, "a 2 diverged; b 0.600 ± 0.000 (n = 3)")


def test_what_diverged_at_rates_that_are_not_the_best_is_not_counted():
    rows = [{"model": "a", "lr": lr, "seed": s, "x": 0.5} for lr, s in ((1, 0), (1, 1), (2, 0))]
    rows.append({"model": "a", "lr": 2, "seed": 1, "diverged": 1})
    assert pivot(rows, NAMES, {"rows": "model", "values": ["x"], "best": "lr"})[1] == [["a", "0.500 ± 0.000"]]
    level = {"text": "", "value": "x", "of": {"model": "a"}, "at_least": 0.5, "best": "lr"}
    assert verdicts(rows, NAMES, [level])[0].found == HOLDS


def test_a_level_that_lies_within_the_interval_over_seeds_is_within_noise():
    def judged(*xs):
        rows = [{"model": "a", "seed": seed, "x": x} for seed, x in enumerate(xs)]
        level = {"text": "", "value": "x", "of": {"model": "a"}, "at_least": 0.95}
        [found] = verdicts(rows, ["model", "seed"], [level])
        return found.found, found.numbers

    assert judged(0.92, 1.0) == (NOISE, "a 0.960 ± 0.508 (n = 2)")
    assert judged(0.99, 0.98, 1.0)[0] == HOLDS and judged(0.5, 0.6, 0.4)[0] == FAILS
    assert judged(0.99) == (HOLDS, "a 0.990 (n = 1)")


def test_plots_average_over_seeds_and_read_numbers_out_of_names(tmp_path):
    assert points(ROWS, NAMES, {"x": "lr", "y": "x", "series": "model"})["a"] == [(1, 0.55), (2, pytest.approx(0.85))]
    wide = [{"model": "a", "r@8": 0.5, "r@16": 0.25}]
    plot = {"title": "t", "x": "r@", "series": "model", "log_x": True, "chance": 0.1}
    assert points(wide, ["model"], plot) == {"a": [(8.0, 0.5), (16.0, 0.25)]}
    pytest.importorskip("matplotlib")
    named = {"title": "dots", "dots": "model", "y": "x", "where": {"lr": 1}}
    assert dots(ROWS, NAMES, named)["a"] == (pytest.approx(0.55), pytest.approx(0.635, abs=1e-3))
    draw(wide, ["model"], [plot, plot], tmp_path / "plot.png")
    draw(ROWS, NAMES, [plot | {"x": "lr", "y": "x"}, named], tmp_path / "dots.png")
    assert (tmp_path / "dots.png").stat().st_size > 1000
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_title_of_a_plot_is_its_finding():
    rows = [
        {"model": name, "seed": s, "y": y + s / 100}
        for name, y in (("a", 1.0), ("b", 2.0), ("c", 1.001))
        for s in (0, 1, 2)
    ]
    plot = {"title": "t", "dots": "model", "y": "y", "lower": True}
    assert finding(rows[:6], ["model", "seed"], plot) == "a is lowest: 1.01 against 2.01 of b"
    assert finding(rows, ["model", "seed"], plot) == "a is lowest, c within noise"
    assert finding([row for row in rows if row["seed"] == 0], ["model", "seed"], plot) == "a is lowest: 1 (one seed)"
    lines = [{"model": name, "x": x, "y": y} for name, y in (("a", 0.5), ("b", 0.25)) for x in (1, 64_000)]
    plot = {"title": "t", "x": "x", "y": "y", "series": "model"}
    assert finding(lines, ["model", "x"], plot) == "a is highest at 64,000: 0.5"
    assert finding(lines, ["model", "x"], plot | {"finding": "its own"}) == "its own"


def test_plots_have_names_beside_lines_in_fixed_colours_intervals_inside_and_a_dark_style(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [{"model": name, "x": x, "y": y} for name, y in (("swa", 0.5), ("titans-mag", 0.5)) for x in (1, 2)]
    draw(lines, ["model", "x"], [{"title": "t", "x": "x", "y": "y", "series": "model"}], tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    for name in ("swa", "titans-mag"):
        assert f">{name}</text>" in svg and f"stroke: {colour(name)}" in svg
        assert f'[style*="stroke: {colour(name)}"] {{ stroke: {colour(name, dark=True)} !important }}' in svg
    heights = sorted(float(y) for y in re.findall(r"translate\([\d.]+ ([\d.]+)\)\">(?:swa|titans-mag)</text>", svg))
    assert not heights or heights[1] - heights[0] > 8
    rows = [{"model": name, "y": y, "seed": s} for name in "ab" for s, y in ((0, 0.0), (1, 1.0))]
    seen = []
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(plots, "save", lambda figure, path: seen.append(figure.axes[0]))
        draw(rows, ["model", "seed"], [{"title": "t", "dots": "model", "y": "y"}], tmp_path / "b.svg")
    low, high = seen[0].get_xlim()
    (mean, half) = dots(rows, ["model", "seed"], {"dots": "model", "y": "y"})["a"]
    assert low < mean - half and mean + half < high


def test_the_table_of_all_claims_has_every_claim_whole():
    experiments = find(None, Path(__file__).parents[2] / "experiments")
    table = claims_table(experiments)
    count = sum(len(experiment.config["claims"]) for experiment in experiments)
    assert f"{count} claims: " in table and table.count("\n| ") == count + 2 and "\n| …" not in table
