"""The sessions of the chat page, by real clicks: rename, fork, delete, export, import, search, address."""

from __future__ import annotations

import pytest
from fake_server import MAGIC
from visiting import answers, menu, send, titles, visit
from webdriver import UNAVAILABLE, Browser

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE or "available")

CLARA = (("user", "My sister Clara plays the drum."), ("assistant", "I have read 6 words, and keep them."))


def test_rename(page, fake):
    fake.add("ann", "Ann", CLARA)
    visit(page, fake)
    page.click(".row-open", "Ann")
    page.find(".user")
    menu(page, "Ann", "Rename")
    page.find("dialog")
    page.type("dialog input", "Clara & <the> drum")  # the old title is selected
    page.press("Enter")
    page.until(lambda: titles(page) == ["Clara & <the> drum"])
    assert fake.sessions["ann"]["title"] == page.text("#title") == "Clara & <the> drum"
    menu(page, "Clara", "Rename")
    page.run("document.querySelector('dialog input').value = '  '")
    page.press("Enter")
    page.find("dialog .trouble", "Title is empty")
    page.press("Escape")
    assert fake.sessions["ann"]["title"] == "Clara & <the> drum"


def test_fork_continues_without_its_origin(page, fake):
    fake.add("ann", "Ann", CLARA)
    visit(page, fake)
    menu(page, "Ann", "Fork")
    page.until(lambda: page.text("#title") == "Fork of Ann")
    assert titles(page) == ["Fork of Ann", "Ann"]
    page.until(lambda: len(page.texts(".turn")) == 1)
    send(page, "What does Clara play?")
    page.until(lambda: answers(page)[-1] == "Clara plays the drum.")
    assert {len(session["messages"]) for session in fake.sessions.values()} == {2, 4}
    assert len(fake.sessions["ann"]["messages"]) == 2


def test_delete_asks_first(page, fake):
    fake.add("ann", "Ann", CLARA)
    fake.add("bob", "Bob", age=60)
    visit(page, fake)
    page.click(".row-open", "Ann")
    page.find(".user")
    menu(page, "Ann", "Delete")
    page.find("dialog", "cannot be brought back")
    page.press("Enter")  # Cancel has the focus
    page.until(lambda: page.texts("dialog") == [])
    assert set(fake.sessions) == {"ann", "bob"}
    menu(page, "Ann", "Delete")
    page.click("dialog button[type=submit]")
    page.until(lambda: titles(page) == ["Bob"])
    page.find(".welcome")
    page.until(lambda: page.run("return location.hash") == "")
    assert set(fake.sessions) == {"bob"}


def test_export_and_import_round_trip(page, fake):
    fake.add("ann", "Ann", CLARA)
    visit(page, fake)
    for file in page.downloads.iterdir():
        file.unlink()
    menu(page, "Ann", "Export")
    file = page.downloads / "ann.safetensors"
    page.until(file.exists)
    assert file.read_bytes().startswith(MAGIC)
    choose(page, file)  # the name is taken
    page.until(lambda: page.text("#title") == "Ann" and "ann-2" in fake.sessions)
    page.until(lambda: page.texts(".turn .user .prose") == ["My sister Clara plays the drum."])
    assert fake.sessions["ann-2"]["messages"] == fake.sessions["ann"]["messages"]


def choose(page: Browser, file) -> None:
    page.run("document.getElementById('import-file').classList.remove('hidden')")
    page.type("#import-file", str(file))
    page.run("document.getElementById('import-file').classList.add('hidden')")


def test_files_that_are_no_sessions_are_refused_in_a_sentence(page, fake, tmp_path):
    visit(page, fake)
    bad = tmp_path / "..a b<i>.safetensors"
    bad.write_bytes(b"not a session")
    choose(page, bad)
    page.find("#alerts .problem", "The file is not a session")
    assert fake.requests[-1][:2] == ("POST", "/v1/sessions/import")
    assert "Try again" not in page.text("#alerts")  # it would be refused again
    page.click("#alerts [aria-label='Close this message']")
    large = tmp_path / "large.safetensors"
    large.write_bytes(bytes(6_000_000))
    before = len(fake.requests)
    choose(page, large)
    page.find("#alerts .problem", "The file has 6.0 MB, but this server accepts at most 5.0 MB.")
    assert len(fake.requests) == before


def test_search_finds_words_of_titles(page, fake):
    for i, title in enumerate(("Clara and the drum", "Hugo and the lamp", "The drum of Hugo")):
        fake.add(f"s{i}", title, age=60 * i)
    visit(page, fake)
    page.until(lambda: len(titles(page)) == 3)
    page.type("#search", "hugo DRUM")
    assert titles(page) == ["The drum of Hugo"] and page.text("#sessions-note") == "1 session found"
    page.type("#search", "x")
    assert titles(page) == [] and page.text("#sessions-note") == "No session matches."


def test_an_answer_goes_on_while_another_session_is_open(page, fake):
    fake.add("ann", "Ann", CLARA, age=60)
    visit(page, fake)
    fake.holds_after, fake.answer = 2, "one two three four five"
    page.until(lambda: titles(page) == ["Ann"])
    send(page, "count")
    page.until(lambda: answers(page) == ["one two"])
    page.click(".row-open", "Ann")
    page.until(lambda: answers(page) == ["I have read 6 words, and keep them."])
    page.find("#sessions li", "writing")
    fake.released.set()
    page.click(".row-open", "count")
    page.until(lambda: answers(page) == ["one two three four five"])
    assert len(fake.sessions["ann"]["messages"]) == 2


def test_the_address_names_the_session(page, fake):
    fake.add("ann", "Ann", CLARA)
    fake.add("bob", "Bob", (("user", "hi"), ("assistant", "hello")), age=60)
    visit(page, fake)
    page.click(".row-open", "Ann")
    page.find(".user", "drum")
    page.click(".row-open", "Bob")
    page.find(".user", "hi")
    page.run("history.back()")
    page.find(".user", "drum")
    assert page.run("return location.hash") == "#ann"
    page.open(fake.url + "#bob")
    page.find(".user", "hi")
    page.open(fake.url + "#nobody")
    page.find(".problem", "There is no session 'nobody'")


def test_a_session_of_somebody_elses_making_shows_every_kind_of_turn(page, fake):
    fake.add("ann", "Ann", (("system", "Be brief."), ("user", "told"), ("user", "asked"), ("assistant", "answered")))
    visit(page, fake)
    page.click(".row-open", "Ann")
    page.find(".system", "Be brief.")
    assert page.texts(".user .prose") == ["told", "asked"] and answers(page) == ["answered"]


def test_a_session_that_somebody_else_began_anew_shows_what_it_has_now(page, fake):
    fake.add("ann", "Ann", CLARA)
    visit(page, fake)
    page.click(".row-open", "Ann")
    page.find(".user", "drum")
    del fake.sessions["ann"]
    send(page, "new")
    page.until(lambda: page.texts(".user .prose") == ["new"])
    assert page.text("#meter").startswith("9 tokens read")


def test_thousands_of_sessions_and_of_turns_stay_quick(page, fake):
    for i in range(5000):
        fake.add(f"s{i}", f"Session {i}", age=60 * i)
    fake.add(
        "long", "Long", tuple((role, f"{role} {i}") for i in range(1500) for role in ("user", "assistant")), age=1e6
    )
    visit(page, fake)
    page.until(lambda: len(titles(page)) == 200)
    assert page.text("#sessions-note") == "The newest 200 of 5,001 sessions are shown: search finds the others."
    page.type("#search", "long")
    page.click(".row-open", "Long")
    page.find(".user", "user 1499")
    assert len(page.texts(".turn")) == 100
    page.click(".earlier", "Show 100 earlier turns")
    page.until(lambda: len(page.texts(".turn")) == 200)
    page.find(".user", "user 1300")
    send(page, "hello there")
    page.until(lambda: answers(page)[-1] == "I have read 2 words, and keep them.")


def test_the_page_works_under_a_path(page, fake):
    fake.prefix = "/some/path"
    fake.add("ann", "Ann", CLARA)
    page.open(fake.url + "some/path/#ann")
    page.find(".user", "drum")
    send(page, "What does Clara play?")
    page.until(lambda: answers(page)[-1] == "Clara plays the drum.")
    page.until(lambda: page.text("#meter") == "22 tokens read, state 1.9 MB, constant")
