"""The demo's page in headless Chromium, as wide as a desk and as narrow as a phone: nothing overflows, no label is cut off."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mnemos.demo import DemoPlan, DemoReport
from mnemos.demo.measure import Asked, Kept
from mnemos.demo.page import page
from mnemos.demo.results import MODEL_NAMES
from mnemos.demo.training import Curve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
CHECK = """
frame.onload = () => {
  const doc = frame.contentDocument, wide = doc.documentElement.clientWidth, found = [];
  if (doc.documentElement.scrollWidth > wide) found.push(`the page is ${doc.documentElement.scrollWidth} wide`);
  for (const e of doc.querySelectorAll(".scroll")) if (e.scrollWidth > e.clientWidth + 1) found.push(`a table overflows: ${e.textContent.slice(0, 40)}`);
  for (const svg of doc.querySelectorAll("svg")) {
    const outer = svg.getBoundingClientRect();
    for (const t of svg.querySelectorAll("text")) {
      const box = t.getBoundingClientRect();
      if (box.left < outer.left - 1 || box.right > outer.right + 1 || box.bottom > outer.bottom + 1) found.push(`cut off: ${t.textContent}`);
    }
  }
  result.textContent = "ANSWER" + JSON.stringify({wide, found, charts: doc.querySelectorAll("svg").length}) + "END";
};
"""


def made_up() -> DemoReport:
    """A report with the longest numbers that can come."""
    plan = DemoPlan()
    people = torch.arange(256, 264).expand(plan.rows, -1)
    things = torch.arange(288 + 24, 288 + 32).expand(plan.rows, -1)

    def asked(distance: int) -> Asked:
        return Asked(distance, people, things, things.flip(1), 1_234_567, 12.345, "a_word_of_300_letters" * 15)

    found = {name: [asked(d) for d in plan.distances_of(name)] for name in MODEL_NAMES}
    curves = {name: Curve([i / 1000 for i in range(1000)], [3.0] * 1000, 100.0, 300) for name in found}
    kept = Kept(Path("facts.safetensors"), 123_456_789, 0.5, 0.5, 1.234567e-7)
    machine = "a processor with a very long name, 128 threads, torch 2.13.0+cpu, Python 3.11.7"
    sizes = dict.fromkeys(found, 1_234_567)
    text = dict.fromkeys(found, 2.345)
    return DemoReport(plan, sizes, curves, found, kept, text, 240.0, machine, Path("x"), Path("y"))


def shown(folder: Path, content: str, width: int) -> dict:
    """The page in a frame, for no window is as narrow as a phone's."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><pre id="result"></pre><iframe id="frame" style="border:0;width:{width}px;height:900px" '
        f'srcdoc="{html.escape(content)}"></iframe><script>{CHECK}</script>'
    )
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1600,1000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", "--dump-dom", wrapper.as_uri()]
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, timeout=120, check=True, env=environment)
    found = re.search(r"ANSWER(.*?)END</pre>", done.stdout.decode("utf-8", errors="replace"))
    assert found, done.stderr.decode()[-500:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_of_the_page_overflows_or_is_cut_off(width, tmp_path):
    answer = shown(tmp_path, page(made_up()), width)
    assert answer == {"wide": width, "found": [], "charts": 3}


def test_something_that_overflows_would_be_seen(tmp_path):
    broken = page(made_up()).replace("<h1>", '<h1 style="width:900px">')
    assert shown(tmp_path, broken, 400)["found"] == ["the page is 912 wide"]
