"""A headless Chromium over its debugging pipe: no driver, no port, no package beyond the browser itself."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
PATIENCE = 30.0


def executable() -> str | None:
    """Path of a Chromium: what ``CHROMIUM`` names, or the first on the PATH; ``None`` where there is none."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process. Use as a context manager."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--force-color-profile=srgb"]
        # The browser reads commands from 3 and answers on 4.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._log = open(Path(self._profile) / "log", "wb")
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", path, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read, False)
        self._ids = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        for answer in self._messages():
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer.get("result", {})
                return result
            self.events.append(answer)
        raise TimeoutError(f"{method}: no answer in {PATIENCE:g} s; {self._tail()}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            head, end, rest = self._rest.partition(b"\0")
            if end:
                self._rest = rest
                yield json.loads(head)
                continue
            try:
                data = os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
                continue
            if not data:
                raise RuntimeError(f"the browser went away; {self._tail()}")
            self._rest += data

    def _tail(self) -> str:
        return (Path(self._profile) / "log").read_text(errors="replace")[-500:]

    def open(
        self, file: Path, *, width: int = 1280, height: int = 800, dark: bool = False, phone: bool = False
    ) -> Page:
        """Open a file from disk in a page of its own, with no network."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        page.media(dark=dark)
        self.events.clear()
        page.call("Page.navigate", url=file.resolve().as_uri())
        page.wait("document.readyState === 'complete'")
        return page


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, by JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:800])
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def problems(self) -> list[str]:
        """Exceptions, console errors, refused content and requests other than for the file itself."""
        found = []
        for event in self._browser.events:
            method, said = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(said["exceptionDetails"])[:500])
            elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
                found.append(said["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
                found.append(json.dumps(said["args"])[:500])
            elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith("file:"):
                found.append(f"request for {said['request']['url'][:200]}")
        return found

    def media(self, *, dark: bool = False, printed: bool = False) -> None:
        """Emulate the colour scheme and the medium."""
        scheme: Sequence[Mapping[str, str]] = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "", features=scheme)

    def key(self, name: str) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if name == "Enter" else {"text": " "} if name == " " else {}
        both = {"key": name, "windowsVirtualKeyCode": KEYS[name]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **both, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click at a place in the window."""
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def place(self, selector: str) -> tuple[float, float]:
        """Middle of an element in the window, scrolled into view."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return x, y

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)["data"])
