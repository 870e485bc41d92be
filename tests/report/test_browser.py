"""The pages in headless Chromium: nothing overflows, nothing is cut off, everything answers to the keyboard."""

from __future__ import annotations

import pytest
import torch
from browser import CHROMIUM, ask
from reporting import TEXT, small_model

from mnemos.audit import run as run_audit
from mnemos.report import analyze, analyze_page, audit_page, inspect, inspect_page, results_page
from mnemos.report.results import comparison_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
LONG = TEXT + "Donaudampfschifffahrtsgesellschaft" * 20 + "\n\n" + "x" * 300 + " \u202e 漢字かな 🙂 " + TEXT

RESULTS = {
    "model": {"path": "runs/x", "weights": "0123456789abcdef"},
    "suites": {
        "needle": {
            "seconds": 12.3,
            "rows": [
                {"task": "passkey", "length": 1_000_000, "depth": d, "generated": d, "likelihood": 1 / 3, "chance": 0.1}
                for d in (0.0, 0.5, 1.0)
            ],
        },
        "length": {"seconds": 1.0, "error": "the text has <b>12</b> tokens"},
        "perplexity": {
            "seconds": 1.0,
            "rows": [
                {"what": what, "memory": memory, "tokens": 123_456, "perplexity": 1234.5, "bits_per_byte": 2.345}
                for memory in ("learning", "frozen")
                for what in ("all tokens", "positions 0…511", "positions 512…4095", "positions 4096…999999")
            ],
        },
        "capacity": {
            "seconds": 1.0,
            "rows": [{"pairs": n, "recall": 1 / n, "chosen": 0.5, "chance": 0.1} for n in (1, 16, 64, 1_000)],
        },
    },
}


def audited() -> dict:
    """A model that fails, with names as long as they come."""
    name = "./a-long-name-of-a-folder" * 8 + ":make"
    found = run_audit(lambda input_ids: torch.eye(50)[input_ids.roll(-1, 1)], name=name, length=16).to_dict()
    found["checks"][0]["text"] = "<b>x</b>" + "y" * 300
    return found


@pytest.fixture(scope="module")
def pages(run, other_run, tokenizer):
    one = inspect(small_model("titans-mag"), tokenizer, LONG, 900, name="a-run-with-a-long-name" * 4)
    two = inspect(small_model("atlas-mag"), tokenizer, LONG, 900, name="second")
    none = inspect(small_model("swa"), tokenizer, LONG, 100, name="no memory")
    first = analyze(run, TEXT, tokens=64, generate=40)
    first.samples.append({"step": 1, "text": "x" * 400})
    return {
        "one": inspect_page([one]),
        "two": inspect_page([one, two]),
        "none": inspect_page([none]),
        "run": analyze_page([first]),
        "eval": results_page(RESULTS, "mnemos eval: " + "a-long-name" * 12),
        "audit": audit_page(audited()),
        "folded": results_page(RESULTS).replace("<details>", "<details open>"),
        "models": comparison_page(
            {"a-long-name" * 9: RESULTS | {"parameters": 10**9}, "second": RESULTS, "swa": RESULTS}
        ),
        "runs": analyze_page([first, analyze(other_run, TEXT, tokens=64, generate=0)]),
    }


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["one", "two", "none", "run", "runs", "eval", "folded", "models", "audit"])
def test_nothing_overflows_or_is_cut_off(pages, name, width, tmp_path):
    answer = ask(tmp_path, pages[name], width)
    assert answer["width"] == width and answer["problems"] == []


def test_something_that_overflows_would_be_seen(pages, tmp_path):
    broken = pages["run"].replace("<body>", '<body><div style="width:2000px">wide</div>', 1)
    assert any("2000" in problem for problem in ask(tmp_path, broken, 1400)["problems"])


def test_every_number_every_layer_and_every_head_can_be_chosen(pages, tmp_path):
    script = """
    answer.seen = {};
    const count = doc.querySelectorAll(".chips input").length;
    for (let i = 0; i < count; i++) {
      const input = [...doc.querySelectorAll(".controls .chips input")][i];
      if (!input) break;
      input.click();
      answer.seen[input.value] = [...doc.querySelectorAll(".tokens span")].filter((s) => Number(s.style.getPropertyValue("--u")) > 0.5).length;
    }
    for (const [label, value] of [["Layer", "1"], ["Head", "2"], ["Scale", "all"]]) {
      const box = [...doc.querySelectorAll(".controls label")].find((l) => l.textContent.startsWith(label)).querySelector("select");
      box.value = value;
      box.dispatchEvent(new win.Event("change"));
    }
    answer.where = doc.querySelector(".detail .soft").textContent;
    doc.querySelector(".check input")?.click();
    answer.difference = [...doc.querySelectorAll(".legend")].map((l) => l.textContent);
    """
    answer = ask(tmp_path, pages["two"], 1400, script)
    assert {
        "surprise",
        "gradient_norm",
        "momentum_norm",
        "lr",
        "retain",
        "momentum",
        "gate",
        "route",
        "share",
        "loss",
        "writing",
        "memory",
    } == set(answer["seen"])
    for name in ("surprise", "loss", "share", "writing"):
        assert answer["seen"][name] > 10, name
    assert answer["where"] == "layer 1, head 1" and answer["later"] == []
    assert "−" in answer["difference"][1]


def test_tokens_are_walked_with_arrow_keys_and_say_what_they_resemble(pages, tmp_path):
    script = """
    const box = doc.querySelector(".tokens"), press = (key) => box.dispatchEvent(new win.KeyboardEvent("keydown", { key, bubbles: true }));
    box.focus();
    press("Home");
    answer.first = doc.querySelector(".detail h3").textContent;
    press("End"); press("ArrowLeft");
    answer.last = doc.querySelector(".detail h3").textContent;
    answer.reads = doc.querySelectorAll(".detail ol li").length;
    answer.marked = doc.querySelectorAll(".tokens .like").length;
    answer.here = doc.querySelectorAll(".tokens .here").length;
    const span = doc.querySelectorAll(".tokens span")[7];
    span.dispatchEvent(new win.PointerEvent("pointerover", { bubbles: true, clientX: 20, clientY: 20 }));
    answer.tip = doc.querySelector(".tip").textContent;
    const radio = doc.querySelector(".controls input[type=radio][value=momentum]");
    radio.focus(); radio.click();
    answer.focus = doc.activeElement.value + "|" + doc.activeElement.checked;
    """
    answer = ask(tmp_path, pages["one"], 1400, script)
    assert answer["first"] == "Token 0: “s”" and answer["last"].startswith("Token 898")
    assert answer["reads"] == 5 and 1 <= answer["marked"] <= 5 and answer["here"] == 1
    assert "token 7" in answer["tip"] and "Surprise:" in answer["tip"]
    assert answer["focus"] == "momentum|true"


@pytest.mark.parametrize("dark", [False, True])
def test_verdicts_of_an_audit_stand_out(pages, dark, tmp_path):
    script = """
    answer.dark = win.matchMedia("(prefers-color-scheme: dark)").matches;
    answer.contrast = [...doc.querySelectorAll(".verdict, .tile b, .audit code, .audit .about")].map((e) => contrast(win, e));
    """
    answer = ask(tmp_path, pages["audit"], 1400, script, dark)
    assert answer["dark"] is dark and len(answer["contrast"]) == 3 * 13 + 3 and min(answer["contrast"]) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_the_strongest_colours(pages, dark, tmp_path):
    script = """
    answer.dark = win.matchMedia("(prefers-color-scheme: dark)").matches;
    const spans = [...doc.querySelectorAll(".tokens span:not(.mark)")].slice(0, 2);
    spans.forEach((s) => s.style.setProperty("--u", 1));
    spans[1].classList.add("cold");
    answer.contrast = [...spans, ...doc.querySelectorAll(".soft, .tile span, legend, h2, .detail dt, .keys span")].map((e) => contrast(win, e));
    """
    answer = ask(tmp_path, pages["one"], 1400, script, dark)
    assert answer["dark"] is dark and min(answer["contrast"]) >= 4.5


def test_charts_answer_to_the_keyboard(pages, tmp_path):
    script = """
    const figure = doc.querySelector("svg[role=img]");
    figure.focus();
    figure.dispatchEvent(new win.KeyboardEvent("keydown", { key: "End", bubbles: true }));
    answer.tip = doc.querySelector(".tip").textContent;
    answer.label = figure.getAttribute("aria-label");
    answer.charts = doc.querySelectorAll("svg[role=img]").length;
    answer.findings = doc.querySelectorAll(".finding").length;
    """
    answer = ask(tmp_path, pages["run"], 1400, script)
    assert answer["tip"].startswith("step 12") and "training" in answer["tip"] and "Loss" in answer["label"]
    assert answer["charts"] >= 12 and answer["findings"] >= 1


@pytest.mark.parametrize("log", ["false", "true"])
def test_ticks_close_together_have_labels_of_their_own(pages, log, tmp_path):
    """11.38, 11.385, 11.39: four digits would name two of them alike; and a logarithmic axis that spans no power of ten."""
    script = f"""
    const spec = {{ title: "x", log: {log}, series: [{{ name: "a", x: [1, 2, 3], y: [11.376, 11.39, 11.396] }}] }};
    const made = win.draw(spec, spec.series, 600);
    answer.labels = [...made.querySelectorAll("text[text-anchor=end]")].map((t) => t.textContent);
    """
    labels = ask(tmp_path, pages["run"], 1400, script)["labels"]
    assert len(labels) >= 3 and len(set(labels)) == len(labels)
    steps = [float(b) - float(a) for a, b in zip(labels, labels[1:])]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)
