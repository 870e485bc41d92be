"""A page in a real browser: shown in a frame of a given width, asked whether anything overflows, and clicked through."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
CATCH = "<script>window.troubles=[];addEventListener('error',e=>troubles.push(e.message));addEventListener('securitypolicyviolation',e=>troubles.push('policy: '+e.violatedDirective));</script>"
CHECK = """
function problems(win) {
  const doc = win.document, found = [...win.troubles], wide = doc.documentElement.clientWidth;
  if (doc.documentElement.scrollWidth > wide) found.push(`the page is ${doc.documentElement.scrollWidth} wide, not ${wide}`);
  const name = (e) => `${e.tagName}.${e.getAttribute("class") || ""} ${(e.textContent || "").slice(0, 30)}`;
  for (const e of doc.body.querySelectorAll("*")) {
    if (e.closest("[hidden], noscript, script, defs") || ["INPUT", "SCRIPT", "NOSCRIPT"].includes(e.tagName)) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > wide + 1 || box.left < -1)) found.push(`beyond the edge: ${name(e)}`);
    const clips = win.getComputedStyle(e).overflowX !== "visible" && !(e instanceof win.SVGElement);
    if (clips && e.scrollWidth > e.clientWidth + 1) found.push(`clipped: ${name(e)}`);
  }
  for (const figure of doc.querySelectorAll("svg[role=img]")) {
    const outer = figure.getBoundingClientRect(), texts = [...figure.querySelectorAll("text")].map((t) => [t, t.getBoundingClientRect()]);
    texts.forEach(([t, b], i) => {
      if (b.left < outer.left - 1 || b.right > outer.right + 1 || b.top < outer.top - 1 || b.bottom > outer.bottom + 1) found.push(`label cut off: ${t.textContent}`);
      for (const [u, c] of texts.slice(i + 1)) if (b.left < c.right && c.left < b.right && b.top + 2 < c.bottom && c.top + 2 < b.bottom) found.push(`labels overlap: ${t.textContent} and ${u.textContent}`);
    });
  }
  return found;
}
// How well text stands out from its background, 1 to 21 (WCAG 2), colours that are seen through included.
function contrast(win, e) {
  const parts = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const layers = [];
  for (let at = e; at; at = at.parentElement) layers.unshift(parts(win.getComputedStyle(at).backgroundColor));
  const back = layers.reduce((under, [r, g, b, a = 1]) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]), [255, 255, 255]);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((s, c, i) => s + c * [0.2126, 0.7152, 0.0722][i], 0);
  const [a, b] = [light(parts(win.getComputedStyle(e).color)), light(back)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
"""


def ask(folder: Path, page: str, width: int, script: str = "", dark: bool = False) -> dict:
    """Show `page` in a frame of `width`, run `script` (with win, doc and an object `answer` to fill in), and return the answer and the problems.

    A window cannot be as narrow as a phone's, a frame can.
    """
    framed = html.escape(page.replace("<head>", f"<head>{CATCH}", 1))
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f"""<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="result"></pre>
<iframe id="frame" style="border:0;width:{width}px;height:900px" srcdoc="{framed}"></iframe>
<script>{CHECK}
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
frame.onload = async () => {{
  const win = frame.contentWindow, doc = win.document, answer = {{}};
  try {{
    await wait(300);
    answer.problems = problems(win);
    answer.width = doc.documentElement.clientWidth;
    {script}
    await wait(300);
    answer.later = problems(win);
  }} catch (wrong) {{ answer.problems = [String(wrong)]; }}
  result.textContent = "ANSWER" + JSON.stringify(answer) + "END";
}};
</script>""",
        encoding="utf-8",
    )
    dom = run(folder, wrapper, "--dump-dom", *(["--blink-settings=preferredColorScheme=0"] if dark else []))
    found = re.search(r'<pre id="result">ANSWER(.*?)END</pre>', dom, re.DOTALL)
    assert found, f"the browser gave no answer: {dom[:500]}"
    return json.loads(html.unescape(found[1]))


def run(folder: Path, page: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1600,1000", "--virtual-time-budget=8000"]
    done = subprocess.run(
        [*command, *flags, page.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
        env=os.environ | {"HOME": str(folder)},
    )
    return done.stdout.decode("utf-8", errors="replace")
