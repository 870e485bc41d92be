"""The page of `mnemos eval`: charts with findings first, then folded tables."""

from __future__ import annotations

import re

import pytest

from mnemos.colours import KNOWN, PALETTE, colour, colour_index
from mnemos.report import results_page
from mnemos.report.results import comparison_page
from mnemos.report.suite_charts import charts_of


def perplexity(learning: float, frozen: float) -> list[dict]:
    places = ("all tokens", "positions 0…99", "positions 100…999")
    return [
        {"what": what, "memory": memory, "tokens": 9, "perplexity": value}
        for memory, value in (("learning", learning), ("frozen", frozen))
        for what in places
    ]


NEEDLES = [
    {"task": "passkey", "length": n, "depth": d, "generated": share, "likelihood": 0.0, "chance": 0.1}
    for (n, d), share in {(100, 0.0): 1.0, (100, 1.0): 0.5, (400, 0.0): 0.25}.items()
]


def results(**suites) -> dict:
    return {"model": {"path": "x"}, "suites": {name: {"seconds": 1.0, "rows": rows} for name, rows in suites.items()}}


@pytest.mark.parametrize(
    ("frozen", "title"),
    [(12.5, "Learning at test time lowers perplexity by 20.0%"), (8.0, "raises perplexity by 25.0%")],
)
def test_the_title_is_the_finding_with_its_sign(frozen, title):
    ((found, drawn),) = charts_of("perplexity", {"x": perplexity(10.0, frozen)})
    assert title in found and drawn.count("<polyline") == 2
    assert "with learning at" in drawn and "without learning" in drawn


def test_the_heat_map_has_a_cell_for_each_measured_depth_and_length_and_no_other():
    ((title, drawn),) = charts_of("needle", {"x": NEEDLES})
    assert title == "Finds 58% of the needles"
    cells = [
        (float(x), float(y), t) for x, y, t in re.findall(r'class="cell" x="([\d.]+)" y="([\d.]+)"[^>]*>(\d+%)', drawn)
    ]
    assert [text for *_, text in cells] == ["100%", "25%", "50%"]
    assert cells[0][1] == cells[1][1] < cells[2][1] and cells[0][0] == cells[2][0] < cells[1][0]


def test_charts_come_before_tables_and_tables_are_folded():
    page = results_page(results(perplexity=perplexity(10.0, 12.5), needle=NEEDLES))
    assert page.index("lowers perplexity") < page.index("Finds 58% of the needles") < page.index("<details>")
    assert page.count("<details>") == 2 and "<script" not in page and page.count("<svg") == 2
    assert "20.0 %" in page[: page.index("<svg")]  # the headline of the gain


def test_several_models_share_a_chart_in_their_own_colours():
    page = comparison_page(
        {"swa": results(perplexity=perplexity(9.0, 9.0)), "mine": results(perplexity=perplexity(8.0, 9.0))}
    )
    drawn = page[page.index("<svg") : page.index("</svg>")]
    assert drawn.count("<polyline") == 4
    assert {*re.findall(r"stroke: var\(--c(\d+)\)", drawn)} == {
        str(KNOWN["swa"]),
        "1",
    } and "mine predicts the end of the text best" in page


def test_suites_without_numbers_have_no_chart():
    assert charts_of("perplexity", {"x": []}) == charts_of("harness", {"x": [{"task": "a"}]}) == []
    assert charts_of("length", {"x": [{"length": 10, "perplexity": None}]}) == []


def test_every_model_has_one_colour_and_pages_know_the_whole_palette():
    from mnemos.report.page import head

    assert colour("titans-mag") == colour("titans-mag", taken=5) != colour("swa")
    places = [place for name, place in KNOWN.items() if name not in ("memory", "window only", "full attention")]
    assert len({*places}) == len(places)
    sheet = head("x")
    for i, (light, dark) in enumerate(PALETTE):
        assert f"--c{i}: {light};" in sheet and f"--c{i}: {dark};" in sheet
    assert colour_index("any", 99) < len(PALETTE)
