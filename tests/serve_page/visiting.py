"""What the tests of the page do again and again, and what they ask the browser."""

from __future__ import annotations

from fake_server import Fake
from webdriver import Browser

WIDTHS = (1400, 400)


# What lies beyond the edge of the window, or is wider than its box and neither cut short on purpose nor scrolled.
PROBLEMS = """
const found = [], wide = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > wide) found.push(`the page is ${document.documentElement.scrollWidth} wide, not ${wide}`);
for (const e of document.body.querySelectorAll("*")) {
  if (!e.checkVisibility({ visibilityProperty: true }) || e.closest("svg, .hidden, .skip") || ["OPTION", "TEXTAREA", "INPUT"].includes(e.tagName)) continue;
  const box = e.getBoundingClientRect(), name = `${e.tagName}#${e.id}.${e.className} ${e.textContent.slice(0, 30)}`;
  if (box.width && (box.right > wide + 1 || box.left < -1)) found.push(`beyond the edge: ${name}`);
  if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== "visible" && !e.classList.contains("clip")) found.push(`clipped: ${name}`);
}
return found;
"""


# How well text stands out from its background, 1 to 21 (WCAG 2), colours that are seen through included.
CONTRAST = """
const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (colour) => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
const light = (c) => c.map((x) => x / 255).map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)).reduce((s, x, i) => s + x * [0.2126, 0.7152, 0.0722][i], 0);
const weak = [];
for (const e of document.body.querySelectorAll("*")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.checkVisibility({ visibilityProperty: true }) || e.closest("svg, .hidden, .skip, :disabled, .check:has(:disabled), [inert], option")) continue;
  const layers = [];
  for (let at = e; at; at = at.parentElement) layers.unshift(rgba(getComputedStyle(at).backgroundColor));
  const back = layers.reduce((under, layer) => over(layer, under), [255, 255, 255]);
  const [a, b] = [light(over(rgba(getComputedStyle(e).color), back)), light(back)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) weak.push(`${ratio.toFixed(2)} ${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`);
}
return weak;
"""


def send(page: Browser, text: str) -> None:
    page.type("#message", text)
    page.click("#send")


def answers(page: Browser) -> list[str]:
    return page.texts(".answer .text")


def done(page: Browser) -> None:
    """Wait until no answer is being written."""
    page.until(
        lambda: page.run(
            "return document.getElementById('stop').hidden && document.querySelectorAll('.turn').length > 0"
        )
    )


def visit(page: Browser, fake: Fake) -> None:
    page.open(fake.url)
    page.find(".welcome, .problem, dialog, .turn")


def menu(page: Browser, title: str, entry: str) -> None:
    page.click(".row-menu", title)
    page.click("#menu button", entry)


def titles(page: Browser) -> list[str]:
    return page.texts(".row-open > span:first-child")


def show(page: Browser, fake: Fake, width: int, address: str = "") -> None:
    page.size(width)
    page.open(fake.url + address)
    page.find(".turn, .welcome")
