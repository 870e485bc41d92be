"""The experiments as they are kept: configs, results, pages and claims fit each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from driver import find, pivot
from driver.page import names, page, readme
from driver.tables import matches
from driver.verdicts import _each

ROOT = Path(__file__).parents[2] / "experiments"
KEPT = [pytest.param(made, id=made.name) for made in find(None, ROOT)]


@pytest.mark.parametrize("made", KEPT)
def test_kept_results_are_those_of_the_config_and_the_readme_is_made_from_them(made):
    wanted = {made.digest(cell) for cell in made.cells()}
    rows = made.results()
    assert {row["digest"] for row in rows} <= wanted, (
        "run `python experiments/run.py NAME --keep`: the config has changed"
    )
    assert not any("error" in row for row in rows)
    varying = names(made)
    for table in made.config["tables"]:
        assert pivot(rows, varying, table)
    assert made.folder.joinpath("README.md").read_text() == readme(made), "run `python experiments/run.py --write`"
    for cell in [*made.cells(), *made.cells(quick=True)]:
        json.dumps(made.whole(cell))
    assert made.cells(quick=True)


COMPARED, LEVEL = {"better", "worse"}, {"of"}
OF_CLAIMS = {"text", "paper", "value", "lower", "where", "best", "at_least", "at_most"} | COMPARED | LEVEL


@pytest.mark.parametrize("made", KEPT)
def test_claims_and_tables_speak_of_cells_that_are_asked_for(made):
    """A slip of the pen would say "not run" for ever."""
    cells = made.cells()
    for claim in made.config["claims"]:
        assert claim.keys() <= OF_CLAIMS and (claim.keys() >= COMPARED) != (claim.keys() >= LEVEL), claim
        for side in [*(claim[s] for s in COMPARED if s in claim), *(_each(claim["of"]) if "of" in claim else [])]:
            where = claim.get("where", {}) | side
            assert any(matches(cell, where) for cell in cells), (claim["text"], where)
    for table in [*made.config["tables"], *made.config.get("plots", [])]:
        assert any(matches(cell, table.get("where", {})) for cell in cells), table["title"]


@pytest.mark.parametrize("made", KEPT)
def test_no_model_is_called_better_for_having_trained_longer(made):
    assert not any(claim.keys() >= COMPARED and claim.get("best") == "steps" for claim in made.config["claims"])


@pytest.mark.parametrize("made", KEPT)
def test_the_quick_version_asks_for_an_order_of_every_experiment_that_has_one(made):
    orders = [claim for claim in made.config["claims"] if claim.keys() >= COMPARED]
    cells = made.cells(quick=True)

    def asked(claim):
        sides = [claim.get("where", {}) | claim[side] for side in COMPARED]
        return all(any(matches(cell, where) for cell in cells) for where in sides)

    assert not orders or any(map(asked, orders))


def test_every_line_of_the_papers_has_claims_that_are_tested_or_said_not_to_be():
    rest = yaml.safe_load((ROOT / "claims.yaml").read_text())
    assert all(row.keys() == {"text", "paper", "why"} and all(row.values()) for row in rest)
    sources = [claim.get("paper", "") for made in find(None, ROOT) for claim in made.config["claims"]]
    sources += [row["paper"] for row in rest]
    tables = [f"Titans, {x}" for x in ("table 1", "table 2", "table 5", "figure 6", "figure 7", "theorem 4.1")]
    tables += [f"Atlas, {x}" for x in ("table 2", "table 4", "table 5", "table 6", "figure 4", "figure 5", "theorem 1")]
    for named in [*tables, "TNT, table 2", "TNT, figure 2", "Miras", "LaCT", "Memory Caching", "Titans Revisited"]:
        assert any(named in source for source in sources), named


def test_the_page_of_results_is_made_from_the_kept_files():
    written = (ROOT.parent / "docs" / "results.md").read_text()
    assert written == page(find(None, ROOT), ROOT), "run `python experiments/run.py --write`"
