"""The chat page as it looks and as it is reached: widths, themes, hostile texts, keyboard, names for screen readers, the inspector."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from fake_server import Fake
from webdriver import UNAVAILABLE, Browser

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE or "available")

HOSTILE = (
    "<img src=x onerror=\"window.hit='img'\">",
    "</script><script>window.hit='script'</script>",
    "\u202egnp.exe\u2066 \u200f\u05e9\u05dc\u05d5\u05dd \u202b",
    "Donaudampfschifffahrtsgesellschaft" * 30,
    "javascript:window.hit='link' [x](javascript:window.hit=1) `<svg onload=window.hit='svg'>`",
    "```\n" + "x" * 500 + "\n<iframe srcdoc='<script>parent.hit=1</script>'>",
    "\x00\x1b[31m\u2028\u2029 {{constructor.constructor('window.hit=1')()}} ${window.hit=1}",
    "漢字かな" * 200 + " 🙂 " + "a\u0301" * 300 + "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 60,
)
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


def show(page: Browser, fake: Fake, width: int, address: str = "") -> None:
    page.size(width)
    page.open(fake.url + address)
    page.find(".turn, .welcome")


def fill(fake: Fake) -> None:
    """Sessions whose titles and messages are all hostile."""
    for i, text in enumerate(HOSTILE):
        fake.add(
            f"s{i}",
            text,
            tuple(("user" if k % 2 == 0 else "assistant", t) for k, t in enumerate((*HOSTILE, text, text))),
            age=60 * i,
        )
    fake.add("system", "x", (("system", HOSTILE[0]), ("user", HOSTILE[3])), age=9000)


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_titles_and_messages_never_run_and_never_overflow(page, fake, width):
    fill(fake)
    fake.answer = "\n".join(HOSTILE)
    for name in ("system", "s7", "s3"):
        show(page, fake, width, f"#{name}")
        assert page.run(PROBLEMS) == [], name
    page.run(
        "document.getElementById('message').value = arguments[0]; document.getElementById('message').dispatchEvent(new Event('input'))",
        HOSTILE[1],
    )
    page.click("#send")
    page.find(".answer .below")
    page.until(lambda: len(page.texts(".turn")) == 6)
    page.click("#inspect")
    page.find(".tokens span")
    assert page.run(PROBLEMS) == []
    page.run("document.querySelector('.tokens').focus()")
    page.press("End", "Left", "Left")
    assert page.run(PROBLEMS) == []
    page.click("[aria-label='Close the inspector']")
    for entry in ("Rename", "Delete"):
        page.click("#more")
        assert page.run(PROBLEMS) == []
        page.click("#menu button", entry)
        page.find("dialog")
        assert page.run(PROBLEMS) == []
        page.press("Escape")
    if width == 400:
        page.click("#drawer-open")
        page.find(".row-open")
        assert page.run(PROBLEMS) == []
    assert page.run(
        "return [window.hit ?? null, document.querySelectorAll('#conversation :is(img, iframe, script, a, svg:not(.icon))').length]"
    ) == [None, 0]


def test_hostile_errors_are_text(page, fake):
    show(page, fake, 1400)
    fake.failures.append(("POST", "/v1/chat/completions", 400, HOSTILE[0] + HOSTILE[2] + HOSTILE[3]))
    page.size(400)
    page.type("#message", "x")
    page.click("#send")
    assert page.text(page.until(lambda: ".problem" if page.texts(".problem") else "")).startswith("<img src=x")
    assert page.run(PROBLEMS) == [] and page.run("return window.hit ?? null") is None


def test_marks_of_direction_do_not_leave_a_title(page, fake):
    fake.add("a", "\u202eevil", ())
    show(page, fake, 1400)
    assert page.texts(".row-open > span:first-child") == ["evil"]


def test_something_too_wide_would_be_seen(page, fake):
    show(page, fake, 1400)
    page.run(
        "const e = document.createElement('div'); e.textContent = 'wide'; e.style.width = '2000px'; document.getElementById('conversation').append(e)"
    )
    found = page.run(PROBLEMS)
    assert any("beyond the edge" in problem for problem in found) and any("clipped" in problem for problem in found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_text_stands_out_from_its_background_everywhere(page, fake, width, scheme):
    fake.add("ann", "Ann", (("system", "Be brief."), ("user", "hello"), ("assistant", "`code` and **bold**")))
    page.prefers(scheme)
    show(page, fake, width)
    assert page.run(CONTRAST) == []
    show(page, fake, width, "#ann")
    page.click("#compare")
    page.type("#message", "What does Clara play?")
    page.click("#send")
    page.find(".other .facts-line", "nothing of it is kept")
    assert page.run(CONTRAST) == []
    page.click("#inspect")
    page.find(".tokens span")
    assert page.run(CONTRAST) == [] and page.run(PROBLEMS) == []
    page.click("[aria-label='Close the inspector']")
    page.click("#more")
    assert page.run(CONTRAST) == []
    page.click("#menu button", "Delete")
    page.find("dialog")
    assert page.run(CONTRAST) == []


def test_faint_text_would_be_seen(page, fake):
    show(page, fake, 1400)
    page.run("document.querySelector('.welcome p').style.color = '#aaa'")
    assert len(page.run(CONTRAST)) == 1


def test_the_theme_follows_the_system_until_it_is_chosen(page, fake):
    show(page, fake, 1400)

    def back() -> str:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    light = back()
    page.prefers("dark")
    dark = back()
    assert light != dark and page.run("return document.getElementById('theme').ariaPressed") == "true"
    page.click("#theme")
    assert back() == light
    show(page, fake, 1400)
    assert back() == light and page.run("return document.getElementById('theme').ariaPressed") == "false"
    page.click("#settings")
    page.run("const s = document.querySelector('dialog select'); s.value = 'system'")
    page.click("dialog button", "Save")
    assert back() == dark


def test_the_drawer_of_a_phone(page, fake):
    fake.add("ann", "Ann", (("user", "hello"), ("assistant", "good day")))
    show(page, fake, 400)
    assert page.run("return document.getElementById('sidebar').inert")
    page.click("#drawer-open")
    page.find("#sidebar .row-open", "Ann")
    assert page.run("return [document.getElementById('main').inert, document.activeElement.id]") == [
        True,
        "drawer-close",
    ]
    page.press("Escape")
    page.until(
        lambda: page.run(
            "return document.getElementById('sidebar').inert && document.activeElement.id === 'drawer-open'"
        )
    )
    page.click("#drawer-open")
    page.click(".row-open", "Ann")
    page.find(".user", "hello")
    page.until(lambda: page.run("return document.getElementById('sidebar').getBoundingClientRect().right <= 0"))
    page.click("#drawer-open")
    page.run("document.elementFromPoint(390, 400).click()")
    page.until(lambda: page.run("return document.getElementById('sidebar').inert"))
    page.click("#inspect")  # all of the window, and closed again
    assert page.run("return document.getElementById('inspector').getBoundingClientRect().width") == 400
    page.press("Escape")
    page.until(lambda: page.run("return document.activeElement.id") == "inspect")


def test_the_inspector_shows_each_token_by_pointer_and_by_keyboard(page, fake):
    show(page, fake, 1400)
    page.type("#message", "My sister Clara plays the drum.")
    page.click("#send")
    page.click(".turn-buttons button", "Inspect")
    page.find(".tokens span")
    assert page.texts(".tokens .who") == ["You", "Answer"] and len(page.texts(".tokens span")) == 14
    levels = "return [...document.querySelectorAll('.tokens span')].map((s) => Number(s.style.getPropertyValue('--u')))"
    surprise = page.run(levels)
    assert max(surprise) == 1 and min(surprise) == 0 and len(set(surprise)) > 3
    page.click(".chips label", "Retain")
    assert page.run(levels) != surprise and "forgets nothing" in page.text("#quantity-note")
    page.hover(".tokens span", "Clara")
    assert (
        "token 2" in page.text("#tip") and "Learning rate" in page.text("#tip") and "Token 2" in page.text(".detail h3")
    )
    page.run("document.querySelector('.tokens').focus()")
    page.press("Home", "Right", "Right", "Right")
    assert page.text(".detail h3") == "Token 3: “ plays”"
    assert len(page.texts(".tokens .like")) == 3 == len(page.texts(".detail li"))
    page.click(".detail .link", "Clara")
    assert (
        page.text(".detail h3").startswith("Token 2")
        and page.run("return document.activeElement.className") == "tokens"
    )
    page.type("#message", "next")  # the panel follows the conversation
    page.press("Enter")
    page.until(lambda: page.texts(".tokens span")[:1] == ["next"])
    page.click("#undo")
    page.find("#inspector .problem", "There is no turn to inspect")


def test_a_turn_of_many_tokens_can_be_inspected(page, fake):
    show(page, fake, 1400)
    fake.answer = "word " * 3000
    page.type("#message", "long")
    page.click("#send")
    page.find(".answer .below")
    page.click("#inspect")
    page.until(lambda: page.run("return document.querySelectorAll('.tokens span').length") > 2500)
    page.run("document.querySelector('.tokens').focus()")
    page.press("End")
    assert page.run(PROBLEMS) == []


def test_a_model_without_memory_has_nothing_to_inspect(page, fake):
    fake.has_memory = False
    show(page, fake, 1400)
    page.type("#message", "hello")
    page.click("#send")
    page.find(".answer .below")
    page.click("#inspect")
    page.find("#inspector", "no memory that learns")


def test_every_control_has_a_name(page, fake):
    fake.add("ann", "Ann", (("user", "hello"), ("assistant", "good day")))
    show(page, fake, 1400, "#ann")
    page.type("#message", "more")
    page.press("Enter")
    page.until(lambda: len(page.texts(".turn")) == 2)
    page.click("#inspect")
    page.find(".tokens span")
    page.cdp("Accessibility.enable")
    try:
        nodes = page.cdp("Accessibility.getFullAXTree")["nodes"]
    finally:
        page.cdp("Accessibility.disable")
    kinds = {
        "button",
        "textbox",
        "searchbox",
        "checkbox",
        "radio",
        "link",
        "img",
        "image",
        "dialog",
        "menu",
        "combobox",
        "region",
        "group",
    }
    named = [
        (n["role"]["value"], n["name"]["value"])
        for n in nodes
        if not n["ignored"] and n.get("role", {}).get("value") in kinds
    ]
    assert [role for role, name in named if not name.strip()] == []
    names = {name for _, name in named}
    assert {
        "Message",
        "Send",
        "Search sessions",
        "Menu of Ann",
        "Undo the last turn",
        "Write",
        "Dark theme",
        "Copy the answer",
    } <= names
    headings = page.run("return [...document.querySelectorAll('h1')].length")
    assert headings == 1 and page.run("return document.documentElement.lang") == "en"


def test_everything_is_reached_by_the_keyboard(page, fake):
    fake.add("ann", "Ann", (("user", "hello"), ("assistant", "good day")))
    show(page, fake, 1400, "#ann")
    page.run("document.activeElement.blur()")
    seen = []
    for _ in range(24):
        page.press("Tab")
        seen.append(
            page.run(
                "const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.className || e.value || e.tagName"
            )
        )
    order = [
        "skip",
        "new-session",
        "search",
        "row-open",
        "Menu of Ann",
        "import",
        "theme",
        "settings",
        "undo",
        "inspect",
        "more",
        "scroll",
        "message",
    ]
    places = [seen.index(name) for name in order]
    assert places == sorted(places) and "compare" in seen
    page.run("document.querySelector('.row-menu').focus()")
    page.press("Enter")
    page.until(lambda: page.run("return document.activeElement.textContent") == "Rename")
    page.press("Down", "Down")
    assert page.run("return document.activeElement.textContent") == "Export"
    page.press("Up", "Up", "Up")
    assert page.run("return document.activeElement.textContent") == "Delete"
    page.press("Escape")
    page.until(lambda: page.run("return document.activeElement.className").startswith("row-menu"))
    page.press("Enter", "End", "Enter")
    page.find("dialog")
    assert page.run("return document.activeElement.textContent") == "Cancel"
    for _ in range(4):  # the focus stays in the dialog
        page.press("Tab")
        assert page.run(
            "return document.activeElement === document.body || Boolean(document.activeElement.closest('dialog'))"
        )
    page.press("Escape")
    page.until(lambda: page.run("return document.activeElement.className").startswith("row-menu"))


def test_answers_are_announced_once_and_whole(page, fake):
    show(page, fake, 1400)
    fake.pause = 0.05
    page.run(
        "window.said = []; new MutationObserver(() => said.push(document.getElementById('live').textContent)).observe(document.getElementById('live'), { childList: true, characterData: true, subtree: true })"
    )
    page.type("#message", "My sister Clara plays the drum.")
    page.click("#send")
    page.until(lambda: any(text.startswith("Answer") for text in page.run("return window.said")))
    assert [text for text in page.run("return window.said") if text] == [
        "The answer is being written.",
        "Answer: I have read 6 words, and keep them.",
    ]
    assert page.run("return document.querySelectorAll('#conversation [aria-live]').length") == 0


def test_nothing_is_loaded_from_elsewhere_and_markup_is_refused(page, fake):
    show(page, fake, 1400)
    page.type("#message", "hello")
    page.click("#send")
    page.find(".answer .below")
    entries = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert len(entries) > 10 and all(name.startswith(fake.url) for name in entries)
    assert "TrustedHTML" in page.run(
        "try { document.body.innerHTML = '<b>x</b>'; return 'taken' } catch (wrong) { return String(wrong) }"
    )
    page.run("window.troubles = []")  # the attempt above


FILES = [Path(str(entry)) for entry in resources.files("mnemos.serve.page").iterdir() if entry.is_file()]


def test_the_files_of_the_page_refer_only_to_each_other():
    names = {path.name for path in FILES}
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= names
    referred = set()
    for path in FILES:
        if path.suffix in {".js", ".html", ".css"}:
            text = path.read_text()
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), (
                path.name
            )
            assert len(text.splitlines()) <= 400, path.name
            referred |= set(re.findall(r'from "\./([\w.]+)"', text)) | set(
                re.findall(r'(?:src|href)="page/([\w.]+)"', text)
            )
    assert referred <= names and names - referred <= {"index.html", "__init__.py"}


def test_the_html_has_nothing_inline():
    text = next(path for path in FILES if path.name == "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", text) and not re.search(
        r"<script(?![^>]*\ssrc=)", text
    )
