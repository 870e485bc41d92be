"""Claims of benchmarks/capacity.py, in float64 and small; and a smoke test of benchmarks/compare.py."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mnemos.memory import make_features

REPOSITORY = Path(__file__).resolve().parents[1]
needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (REPOSITORY / ".git").exists(), reason="needs a clone of the repository"
)


@pytest.fixture(scope="module")
def benchmark():
    """Imports a benchmark by name."""
    folder = str(REPOSITORY / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def capacity(benchmark):
    return benchmark("capacity")


@pytest.fixture(scope="module")
def compare(benchmark):
    return benchmark("compare")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dim, n", [(8, 1), (8, 5), (8, 8), (64, 64), (130, 129)])
def test_orthonormal_keys_up_to_the_dimension_are_recalled_to_rounding_by_one_pass(capacity, dim, n):
    assert capacity.orthonormal_error(dim, n) <= 1e-12


def test_measured_ranks_are_the_theoretical_ones_on_unit_and_on_gaussian_keys(capacity):
    spec = capacity.linear_spec
    rows = capacity.ranks(
        [*capacity.MAPS.values(), spec("sketch", feature_dim=64), spec("monomials", degree=2, dim=16)]
    )
    for row in rows:
        for keys in ("unit keys", "Gaussian keys"):
            assert row[keys] == row[f"{keys}, theory"], row
    found = {(row["map"], row["dim"]): (row["unit keys"], row["Gaussian keys"]) for row in rows}
    assert found["identity", 8] == found["elementwise, degree 2", 8] == (8, 8)
    assert found["monomials, degree 2", 8] == (44, math.comb(10, 2))
    assert found["monomials, degree 3", 8] == (156, math.comb(11, 3))
    assert found["monomials, degree 2", 16] == (152, math.comb(18, 2))
    assert found["sketch, degree 2, 32 features", 8] == (32, 32)
    assert found["sketch, degree 2, 64 features", 8] == (44, 45)


@pytest.mark.parametrize("features", ["identity", "elementwise", "monomials", "sketch"])
def test_squaring_one_pass_is_writing_all_pairs_again_and_again(capacity, features):
    spec = capacity.linear_spec(features)
    k, v = capacity.directions(2, 12, 8), capacity.directions(2, 12, 8)
    phi = make_features(spec, 1)
    squared = capacity.weights_after(k, v, spec, phi, [0, 3])
    for passes, W in zip((1, 8), squared):
        assert (W - capacity.literal_passes(k, v, spec, phi, passes)).abs().max() < 1e-12


def test_identity_fails_beyond_d_where_monomials_of_degree_2_still_recall(capacity):
    passes = "2^20 passes"
    within = capacity.feature_point(capacity.MAPS["identity"], 6, seeds=2)[passes]
    beyond = capacity.feature_point(capacity.MAPS["identity"], 16, seeds=2)[passes]
    lifted = capacity.feature_point(capacity.MAPS["monomials, degree 2"], 16, seeds=2)[passes]
    assert within["error"] < 1e-9 and within["recall"] == 1
    assert beyond["error"] > 0.3 and beyond["recall"] < 0.9
    assert lifted["error"] < 1e-9 and lifted["recall"] == 1


def test_elementwise_features_hold_no_more_pairs_than_identity(capacity):
    point = capacity.feature_point(capacity.MAPS["elementwise, degree 2"], 16, seeds=2)
    assert point["2^20 passes"]["error"] > 0.3
    assert point["least squares"]["error"] > 0.3


@pytest.mark.parametrize("name, rank", [("identity", 8), ("monomials, degree 2", 44)])
def test_some_weights_fit_as_many_random_pairs_as_the_rank_and_no_more(capacity, name, rank):
    spec = capacity.MAPS[name]
    assert capacity.feature_point(spec, rank, seeds=2)["least squares"]["error"] < 1e-9
    assert capacity.feature_point(spec, rank + 1, seeds=2)["least squares"]["error"] > 1e-2


def test_one_pass_over_random_keys_is_not_the_least_squares_fit(capacity):
    point = capacity.feature_point(capacity.MAPS["identity"], 6, seeds=4)
    assert point["1 pass"]["error"] > 0.1
    assert point["least squares"]["error"] < 1e-9


@pytest.mark.parametrize("rule", ["gd", "muon"])
def test_an_mlp_memory_recalls_twice_d_pairs_after_some_passes_where_a_linear_one_cannot(capacity, rule):
    deep = capacity.structure_point(capacity.structure_spec("mlp", rule, 16), 16, passes=32, seeds=2)
    flat = capacity.structure_point(capacity.structure_spec("linear", rule, 16), 16, passes=32, seeds=2)
    assert deep["recall"] == 1 and deep["error"] < 0.2
    assert flat["error"] > 0.4


def test_a_memory_that_diverges_is_reported_as_such_and_never_chosen(capacity):
    point = capacity.structure_point(capacity.structure_spec("mlp", "gd", 1), 32, passes=4, seeds=2)
    assert 1.0 in point["diverged"]
    assert point["lr"] not in point["diverged"] and math.isfinite(point["error"])
    lost = torch.full((1, 3, 2), math.nan)
    assert capacity.relative_error(lost, torch.ones(1, 3, 2)).item() == math.inf


def test_tables_and_numbers_of_a_small_run_can_be_printed_and_saved(capacity, monkeypatch):
    monkeypatch.setattr(capacity, "MAPS", {"identity": capacity.MAPS["identity"]})
    monkeypatch.setattr(capacity, "STRUCTURES", {"linear, gd, c = 1": capacity.structure_spec("linear", "gd", 1)})
    features, structures = capacity.feature_curves(quick=True), capacity.structure_curves(quick=True)
    assert "| identity | 8 | 1 |" in capacity.largest_table(features)
    for passes in ("1 pass", "many passes"):
        assert "| linear, gd, c = 1 | 64 |" in capacity.structure_table(structures, passes)
    assert "| identity | 8 | 8 | 8 | 8 | 8 | 8 |" in capacity.rank_table(capacity.ranks(list(capacity.MAPS.values())))
    assert json.loads(json.dumps(capacity._short(features)))["identity"]["rank"] == 8


def test_every_combination_of_structure_rule_and_window_is_measured(capacity):
    found = {(spec.structure, spec.rule, spec.window) for spec in capacity.STRUCTURES.values()}
    assert found == set(itertools.product(("linear", "mlp"), ("gd", "muon"), (1, 16)))


@needs_git
def test_compare_measures_the_working_tree_and_a_commit_in_turn(compare, tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compare.main(["HEAD", "--only", "decode", "--presets", "swa", "--rounds", "1", "--json", str(file)])
    assert str(tmp_path) not in compare.git("worktree", "list")
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "| decode swa |" in printed and "geometric mean" in printed and "smallest" in printed
    case = found["cases"]["decode swa"]
    assert case["interval"][0] <= case["speedup"] <= case["interval"][1]
    assert len(case["wall_seconds"]["old"]) == len(case["wall_seconds"]["new"]) == compare.PAIRS_PER_ROUND["decode"]
    assert found["summary"]["smallest"] == case["speedup"] == pytest.approx(found["summary"]["geometric_mean"])


def test_compare_bootstraps_the_speedup_of_each_case_and_of_all(compare):
    def case(old: float, new: float) -> dict:
        return {"speedup": old / new, "wall_seconds": {"old": [old] * 9, "new": [new] * 9}}

    total = compare.summary({"a": case(2.0, 1.0), "b": case(1.0, 2.0), "c": {"error": "unknown preset"}})
    assert total["geometric_mean"] == pytest.approx(1) and total["interval"] == pytest.approx((1, 1))
    assert (total["smallest"], total["smallest_case"]) == (0.5, "b")
    low, high = compare.interval(compare.bootstrap([1.0, 1.1, 1.2, 1.3, 1.4] * 4))
    assert 1.0 <= low < 1.2 < high <= 1.4


def test_compare_chooses_cases_by_kind_preset_and_backend(compare, benchmark):
    assert len(compare.cases(list(compare.KINDS), None, "auto")) == 6 + 2 + 5
    assert list(compare.cases(["decode"], ["titans-mac"], "auto")) == ["decode titans-mac"]
    assert all(case["backend"] == "torch" for case in compare.cases(["layer"], None, "torch").values())
    assert [row[:6] for row in benchmark("speed").PEER_ROWS] == list(compare.LAYERS)


@needs_git
@pytest.mark.parametrize(
    "arguments, words",
    [([], "BASE is missing"), (["no-such-commit"], "is not a commit"), (["HEAD", "--rounds", "0"], "at least 1")],
)
def test_compare_explains_bad_arguments(compare, arguments, words, capsys):
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert words in capsys.readouterr().err
