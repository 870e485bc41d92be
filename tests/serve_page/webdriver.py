"""A browser for tests: Chromium through chromedriver, by the WebDriver protocol over HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
UNAVAILABLE = "" if CHROMIUM and CHROMEDRIVER else "Chromium and chromedriver are not installed"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
# Errors of scripts and violations of the policy, and how many answers of the server are awaited, from the first moment of a page.
WATCH = """
window.awaited = 0;
const counted = (call) => function (...args) {
  awaited++;
  return call.apply(this, args).finally(() => { awaited--; });
};
window.fetch = counted(window.fetch);
for (const name of ["json", "text", "blob", "arrayBuffer"]) Response.prototype[name] = counted(Response.prototype[name]);
window.troubles = [];
addEventListener("error", (e) => troubles.push("error: " + e.message));
addEventListener("unhandledrejection", (e) => troubles.push("rejection: " + (e.reason?.message ?? e.reason)));
document.addEventListener("securitypolicyviolation", (e) => troubles.push(`policy: ${e.violatedDirective} ${e.blockedURI}`));
"""
# Ends when the page has come to rest: nothing is awaited for three frames (streams that go on count until they begin), or after two seconds.
SETTLE = """
const done = arguments[0], end = performance.now() + 2000;
let calm = 0;
(function look() {
  calm = window.awaited ? 0 : calm + 1;
  if (calm > 3 || performance.now() > end) done(null);
  else requestAnimationFrame(() => setTimeout(look));
})();
"""
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Down": "\ue015", "Up": "\ue013", "Left": "\ue012"}
KEYS |= {"Right": "\ue014", "Home": "\ue011", "End": "\ue010", "Shift": "\ue008", "Control": "\ue009"}
WAIT = 20.0


class BrowserError(Exception):
    """An error that chromedriver reports."""


class Browser:
    """One window. `folder` holds the profile and downloads."""

    def __init__(self, port: int, folder: Path):
        self.base = f"http://127.0.0.1:{port}"
        self.troubles: list[str] = []  # of the pages so far
        self.downloads = folder / "downloads"
        self.downloads.mkdir(exist_ok=True)
        options = {
            "binary": CHROMIUM,
            "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,900"],
            "prefs": {"download.default_directory": str(self.downloads), "download.prompt_for_download": False},
        }
        opened = self._call(
            "POST",
            "/session",
            {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}},
        )
        self.base += f"/session/{opened['sessionId']}"
        self.cdp("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        self.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as wrong:
            raise BrowserError(json.load(wrong)["value"]["message"].splitlines()[0]) from None

    def close(self) -> None:
        self._call("DELETE", "")

    def cdp(self, command: str, **params: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def size(self, width: int, height: int = 900) -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def prefers(self, scheme: str) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self.troubles += self.run("return window.troubles ?? []")
        self._call("POST", "/url", {"url": "about:blank"})
        if url != "about:blank":
            self._call("POST", "/url", {"url": url})
            self.settle()

    def run(self, script: str, *args: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def settle(self) -> None:
        """Wait until the page has dealt with what was clicked or typed: events and closing dialogs are tasks of their own."""
        with contextlib.suppress(BrowserError):  # the action opened another page
            self._call("POST", "/execute/async", {"script": SETTLE, "args": []})

    def all(self, css: str) -> list[str]:
        found = self._call("POST", "/elements", {"using": "css selector", "value": css})
        return [entry[ELEMENT] for entry in found]

    def find(self, css: str, text: str = "") -> str:
        """The first visible element, with `text` in it; waits until there is one."""
        return self.until(lambda: self._visible(css, text), f"no visible {css} with {text!r}")

    def _visible(self, css: str, text: str) -> str | None:
        found = self.run(
            "return [...document.querySelectorAll(arguments[0])].find((e) => e.checkVisibility({visibilityProperty: true}) && (e.textContent + (e.getAttribute('aria-label') ?? '')).includes(arguments[1]))",
            css,
            text,
        )
        return found and found[ELEMENT]

    def click(self, css: str, text: str = "") -> None:
        """A real click, in the middle of the element, once nothing covers it."""
        self.until(lambda: self._clicked(css, text), f"{css} with {text!r} cannot be clicked")
        self.settle()

    def _clicked(self, css: str, text: str) -> bool:
        try:
            self._call("POST", f"/element/{self.find(css, text)}/click")
        except BrowserError as wrong:
            if "intercepted" in str(wrong) or "stale" in str(wrong) or "interactable" in str(wrong):
                return False
            raise
        return True

    def type(self, css: str, text: str) -> None:
        self._call("POST", f"/element/{self.find(css)}/value", {"text": text})
        self.settle()

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus; "Shift+Tab" holds the first."""
        for key in keys:
            parts = [KEYS.get(part, part) for part in key.split("+")]
            actions = [{"type": "keyDown", "value": part} for part in parts]
            actions += [{"type": "keyUp", "value": part} for part in reversed(parts)]
            self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})
            self.settle()

    def hover(self, css: str, text: str = "") -> None:
        move = {"type": "pointerMove", "duration": 0, "origin": {ELEMENT: self.find(css, text)}, "x": 0, "y": 0}
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def text(self, css: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css)

    def texts(self, css: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", css)

    def until(self, check: Callable[[], Any], trouble: str = "", seconds: float = WAIT) -> Any:
        """The first true value of `check`."""
        end = time.monotonic() + seconds
        while not (found := check()):
            assert time.monotonic() < end, trouble or "waited in vain"
            time.sleep(0.03)
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser of its own, ended with its driver."""
    assert CHROMEDRIVER is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        [CHROMEDRIVER, f"--port={port}", "--log-level=OFF"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5):
                break
            time.sleep(0.05)
        browser = Browser(port, folder)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(timeout=10)
