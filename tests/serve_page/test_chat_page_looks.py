"""The chat page as it looks: widths, themes, contrast, the drawer of a phone, and hostile texts."""

from __future__ import annotations

import pytest
from fake_server import Fake
from visiting import CONTRAST, PROBLEMS, WIDTHS, show
from webdriver import UNAVAILABLE

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
    page.until(lambda: back() == dark)  # the dialog closes first


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
