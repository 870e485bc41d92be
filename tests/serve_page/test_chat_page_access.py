"""The inspector, the keyboard, names and announcements for screen readers, and requests to nobody else."""

from __future__ import annotations

import pytest
from visiting import PROBLEMS, show
from webdriver import UNAVAILABLE

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE or "available")


def test_the_inspector_shows_each_token_by_pointer_and_by_keyboard(page, fake):
    show(page, fake, 1400)
    page.type("#message", "My sister Clara plays the drum.")
    page.click("#send")
    page.click(".turn-buttons button", "Inspect")
    page.find(".tokens span")
    assert page.texts(".tokens .who") == ["You", "Answer"] and len(page.texts(".tokens span")) == 15
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
    assert page.texts(".tokens span")[-1] == "⟨14⟩"  # a token without text
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
    page.find("#inspector", "There is no turn to inspect since the server opened the session. Send a message")


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
