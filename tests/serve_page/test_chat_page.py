"""The chat page in a real browser, by clicks and keys: turns, streaming, memory modes, errors, keys."""

from __future__ import annotations

import pytest
from visiting import answers, done, send, titles, visit
from webdriver import UNAVAILABLE

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE or "available")


def test_the_empty_page_says_what_it_is_and_offers_three_things(page, fake):
    visit(page, fake)
    assert "memory that learns while it reads" in page.text(".welcome")
    assert len(page.texts(".example")) == 3
    page.click(".example", "with and without")
    assert page.run(
        "return [document.getElementById('message').value, document.getElementById('compare').checked]"
    ) == [
        "What does my sister Clara play?",
        True,
    ]
    page.click(".example", "surprised")
    assert page.run("return document.getElementById('compare').checked") is False
    assert "Last turn" in page.text("#inspector")


def test_answers_stream_and_the_meter_counts(page, fake):
    visit(page, fake)
    fake.holds_after = 4
    send(page, "My sister Clara plays the drum.")
    page.until(lambda: answers(page) == ["I have read 6"])
    page.until(lambda: "being written" in page.text("#live"))  # said a moment after the change, for screen readers
    assert page.find("#stop") and "writing" in page.text("#sessions")
    fake.released.set()
    done(page)
    assert answers(page) == ["I have read 6 words, and keep them."]
    assert page.text("#meter") == "14 tokens read, state 1.9 MB"
    assert titles(page) == ["My sister Clara plays the drum."] and page.text("#title") == titles(page)[0]
    send(page, "What does Clara play?")
    page.until(lambda: "Clara plays the drum." in answers(page))
    page.until(lambda: page.text("#meter") == "22 tokens read, state 1.9 MB, constant")
    (first, second) = fake.posted("/v1/chat/completions")
    assert first["session"] == second["session"] and first["stream"] and first["memory"] == "write"
    assert second["messages"] == [{"role": "user", "content": "What does Clara play?"}]  # only what is new
    assert second["max_tokens"] == 256 and second["temperature"] == 0.7 and first["seed"] != second["seed"]


def test_a_state_that_grows_is_not_called_constant(page, fake):
    visit(page, fake)
    fake.grows = 64_000
    for text in ("one", "two"):
        send(page, text)
        done(page)
    page.until(lambda: page.text("#meter") == "18 tokens read, state 2.0 MB, +64.0 kB by the last turn")


def test_stop_ends_the_answer_and_shows_the_part_that_the_session_keeps(page, fake):
    visit(page, fake)
    fake.pause, fake.answer = 0.1, "one two three four five six seven eight nine ten eleven twelve " * 9
    send(page, "count")
    page.until(lambda: "two" in "".join(answers(page)))
    page.click("#stop")
    page.find(".facts-line", "Stopped; the session keeps this part")
    (name,) = fake.sessions
    kept = fake.sessions[name]["messages"]
    assert kept[1]["content"].strip() == answers(page)[0].strip() and len(kept) == 2 and len(kept[1]["content"]) < 300
    fake.answer, fake.pause = "and on", 0
    send(page, "go on")
    page.until(lambda: answers(page)[-1] == "and on")
    assert len(fake.sessions[name]["messages"]) == 4


def test_enter_sends_and_shift_enter_begins_a_line(page, fake):
    visit(page, fake)
    page.type("#message", "first")
    page.press("Shift+Enter")
    page.type("#message", "second")
    page.press("Enter")
    done(page)
    assert fake.posted("/v1/chat/completions")[0]["messages"][0]["content"] == "first\nsecond"
    page.press("Enter")  # an empty message is not sent
    assert len(fake.posted("/v1/chat/completions")) == 1


def test_an_error_is_one_sentence_with_a_retry(page, fake):
    visit(page, fake)
    fake.failures.append(("POST", "/v1/chat/completions", 507, "The disk is full: delete a session, then try again."))
    send(page, "hello there")
    page.find(".problem", "The disk is full: delete a session, then try again.")
    assert fake.sessions == {} and page.text("#meter") == "Nothing read yet"
    page.click(".problem button", "Try again")
    page.until(lambda: answers(page) == ["I have read 2 words, and keep them."])
    assert page.texts(".problem") == [] and len(page.texts(".turn")) == 1


def test_a_connection_that_breaks_off_shows_what_the_session_has(page, fake):
    visit(page, fake)
    fake.breaks_after = 3
    send(page, "hello there")
    page.find(".problem", "The connection ended before the answer did.")
    fake.breaks_after = None
    page.click(".problem button", "Try again")
    page.until(lambda: answers(page) == ["I have read 2 words, and keep them."])


def test_a_server_that_is_away_is_named(page, fake):
    fake.failures.append(("GET", "/v1/sessions", 503, "The server is shutting down: try again in a moment."))
    visit(page, fake)
    page.find("#alerts .problem", "The server is shutting down")
    fake.add("ann", "Ann")
    page.click("#alerts .problem button", "Try again")
    page.until(lambda: titles(page) == ["Ann"] and not page.texts("#alerts .problem"))


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(page, fake):
    fake.key = "sk-right"
    fake.add("ann", "Ann")
    visit(page, fake)
    page.find("dialog", "answers only with an API key")
    page.type("dialog input", "wrong")
    page.press("Enter")
    page.find("dialog", "refused this key")
    page.type("dialog input", "sk-right")
    page.click("dialog button[type=submit]")
    page.until(lambda: titles(page) == ["Ann"])
    assert page.run("return [Object.values(sessionStorage), Object.values(localStorage)]") == [["sk-right"], []]
    visit(page, fake)
    page.until(lambda: titles(page) == ["Ann"])
    assert page.texts("dialog") == []


def test_no_key_leaves_a_sentence_and_a_way_back(page, fake):
    fake.key = "sk-right"
    visit(page, fake)
    page.find("dialog")
    page.press("Escape")
    page.click(".problem button", "Try again")
    page.find("dialog")
    page.type("dialog input", "sk-right")
    page.press("Enter")
    page.find(".welcome")


def test_undo_takes_back_the_turn_and_returns_its_text(page, fake):
    visit(page, fake)
    for text in ("first", "second"):
        send(page, text)
        done(page)
    page.click("#undo")
    page.until(lambda: len(page.texts(".turn")) == 1)
    assert page.run("return document.getElementById('message').value") == "second"
    (session,) = fake.sessions.values()
    assert [m["content"] for m in session["messages"] if m["role"] == "user"] == ["first"]
    page.until(lambda: page.text("#meter").startswith("9 tokens read"))
    fake.undone.clear()
    page.click("#undo")
    page.find("#alerts .problem", "There is no turn to undo")
    assert len(page.texts(".turn")) == 1


def test_what_is_read_or_off_is_not_kept_and_says_so(page, fake):
    visit(page, fake)
    send(page, "My sister Clara plays the drum.")
    done(page)
    for mode, said, note in (
        ("Read", "Clara plays the drum.", "Memory read, not written"),
        ("Off", "I do not know what Clara plays.", "Memory off"),
    ):
        page.click("#memory label", mode)
        send(page, "What does Clara play?")
        page.until(lambda said=said: answers(page)[-1] == said)
        page.find(".facts-line", note)
    (session,) = fake.sessions.values()
    assert len(session["messages"]) == 2 and page.text("#meter") == "14 tokens read, state 1.9 MB"
    assert [body["memory"] for body in fake.posted("/v1/chat/completions")] == ["write", "read", "off"]
    assert page.run("return document.getElementById('compare').disabled")
    page.click("#undo")  # takes the unwritten turn off the page
    page.until(lambda: len(page.texts(".turn")) == 2)
    assert fake.posted(f"/v1/sessions/{session['id']}/undo") == [] and len(session["messages"]) == 2


def test_the_answer_without_memory_stands_beside_and_touches_no_session(page, fake):
    visit(page, fake)
    send(page, "My sister Clara plays the drum.")
    done(page)
    page.click("#compare")
    send(page, "What does Clara play?")
    page.find(".other .facts-line", "From this message alone, with an empty memory")
    page.until(lambda: answers(page)[1:] == ["Clara plays the drum.", "I do not know what Clara plays."])
    first, second = sorted(fake.posted("/v1/chat/completions")[1:], key=lambda body: "session" not in body)
    assert not {"session", "memory"} & second.keys() and second["seed"] == first["seed"]
    (session,) = fake.sessions.values()
    assert len(session["messages"]) == 4
    boxes = page.run("return [...document.querySelectorAll('.side')].map((e) => e.getBoundingClientRect().top)")
    assert boxes[0] == boxes[1]
    page.click(".row-open", "My sister")  # opening it again keeps the comparison
    page.until(lambda: len(page.texts(".side")) == 2)


def test_a_failed_comparison_is_tried_again_alone(page, fake):
    visit(page, fake)
    page.click("#compare")
    fake.failures.append(("POST", "/v1/chat/completions", 429, "There are too many requests: try again in a moment."))
    fake.failures.append(("POST", "/v1/chat/completions", 429, "There are too many requests: try again in a moment."))
    send(page, "hello there")
    page.until(lambda: len(page.texts(".problem")) == 2)
    for left in (1, 0):
        page.click(".problem button", "Try again")
        page.until(lambda left=left: len(page.texts(".problem")) == left)
    page.until(lambda: len(answers(page)) == 2 and all("2 words" in text for text in answers(page)))


def test_a_model_without_memory_offers_none(page, fake):
    fake.has_memory = False
    visit(page, fake)
    page.until(lambda: "no memory of its own" in page.text("#memory-note"))
    assert page.run(
        "return document.getElementById('memory').matches(':disabled') && document.getElementById('compare').disabled"
    )
    send(page, "hello")
    done(page)
    assert len(answers(page)) == 1


def test_settings_are_sent_and_kept(page, fake):
    visit(page, fake)
    page.click("#settings")
    page.find("dialog", "titans-mag-nano")
    for field, value in (("Temperature", "0"), ("Longest answer", "99999")):
        page.run(
            "const f = [...document.querySelectorAll('dialog label')].find((l) => l.textContent.startsWith(arguments[0])).querySelector('input'); f.value = arguments[1]",
            field,
            value,
        )
    page.click("dialog button", "Save")
    page.find("dialog .trouble", "from 1 to 1024 tokens")
    page.run(
        "[...document.querySelectorAll('dialog label')].find((l) => l.textContent.startsWith('Longest')).querySelector('input').value = '12'"
    )
    page.click("dialog button", "Save")
    visit(page, fake)
    page.find(".welcome")
    send(page, "hello")
    done(page)
    (body,) = fake.posted("/v1/chat/completions")
    assert body["temperature"] == 0 and body["max_tokens"] == 12


def test_messages_show_code_and_keep_everything_else_as_written(page, fake):
    visit(page, fake)
    fake.answer = "Use `a<b>` and **bold**:\n\n```python\nprint('<b>')\n```\nDone * not * bold."
    send(page, "show `code`")
    done(page)
    page.until(lambda: page.texts(".answer pre") == ["print('<b>')"])
    assert page.texts(".answer .prose") == ["Use a<b> and bold:", "Done * not * bold."]
    assert page.texts(".answer .prose code") == ["a<b>"] and page.texts(".answer strong") == ["bold"]
    assert page.texts(".user .prose") == ["show `code`"]
