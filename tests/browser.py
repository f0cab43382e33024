"""Headless Chromium for tests of pages, driven over the DevTools protocol on a pipe; standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from waiting import Work, status_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0


def find_chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. log: console messages and exceptions of warning level and above. requests: addresses asked for,
    but for the page itself and `data:`."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer, self._number, self._session = b"", 0, ""
        self.log: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command; events that come before it are recorded."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        work = Work()
        while (answer := self._next(work)).get("id") != self._number:
            self._record(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self, work: Work) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._receive], [], [], 0.05)[0]:
                if work.seconds() > SECONDS:
                    raise TimeoutError("Chromium did not answer")
                continue
            data = os.read(self._receive, 1 << 20)
            if not data:
                raise ConnectionError("Chromium ended")
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def _record(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.log.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.log.append(json.dumps(parameters["args"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.log.append(json.dumps(parameters["entry"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, path: Path) -> None:
        """Loads a report's page, and waits until its charts are drawn."""
        address = path.resolve().as_uri()
        self.call("Page.navigate", url=address)
        work = Work()
        while not self.evaluate("document.documentElement?.dataset.ready === 'yes'"):
            if work.seconds() > SECONDS:
                raise TimeoutError(f"the page was not ready; console: {self.log}")
            time.sleep(0.05)
        self.requests = [each for each in self.requests if each != address and not each.startswith("data:")]

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, awaited; it must be JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:800])
        return result["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Key presses, as a person's."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36}
        extra: dict[str, Any] = {"windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())), "key": key, "code": key}
        if key == "Enter":
            extra["text"] = "\r"
        elif len(key) == 1:
            extra["text"] = key
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown", **extra)
            self.call("Input.dispatchKeyEvent", type="keyUp", **extra)

    def size(self, width: int, height: int) -> None:
        """The size of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Sets the colour scheme that the system prefers: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it is printed, A4."""
        answer = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def chromium(profile: Path, options: Sequence[str] = ()) -> Iterator[Page]:
    """A headless Chromium with an empty tab.

    Args:
        profile: a folder for it alone.
    """
    path = find_chromium()
    assert path is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-extensions", "--hide-scrollbars", *options]
    command = [path, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    # Chromium takes its pipes as descriptors 3 and 4, which may be taken here. dash knows descriptors up to 9 alone.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (to_read, from_write)]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", *command]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(shell, pass_fds=theirs, stdout=quiet, stderr=quiet, start_new_session=True)
    for end in (to_read, from_write, *theirs):
        os.close(end)
    try:
        page = Page(to_write, from_read)
        yield page
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        status_of(process, 30.0)
        os.close(to_write)
        os.close(from_read)
