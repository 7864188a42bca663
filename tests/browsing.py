"""A headless Chromium that tests open pages in, over its DevTools protocol on a pipe: no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)

PATIENCE = 60.0
"""Seconds that an answer may take."""

Json = dict[str, Any]

_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, "")}


class Browser:
    """One running Chromium with one tab.

    Attributes
    ----------
    complaints
        What the page said on its console, exceptions and refusals of its content security policy
        among it, since it was opened.
    """

    def __init__(self, profile: Path) -> None:
        if CHROMIUM is None:
            raise FileNotFoundError("chromium is not installed (apt-get install chromium)")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}',
                CHROMIUM,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> Json:
        """Return the answer to one command of the protocol; note what is reported meanwhile."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: Json = answer["result"]
                return result

    def _next(self) -> Json:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer from {CHROMIUM} within {PATIENCE:.0f} s")
            self._buffer += os.read(self._in, 1 << 20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: Json = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Log.entryAdded":
            self.complaints.append(str(params["entry"]["text"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        return message

    def open(
        self,
        address: str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        medium: Literal["screen", "print"] = "screen",
    ) -> None:
        """Load a page as a window of this size shows it, to somebody who prefers ``scheme``."""
        self.look(width=width, height=height, scheme=scheme, medium=medium)
        self.complaints.clear()
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._next()

    def look(
        self,
        *,
        width: int,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        medium: Literal["screen", "print"] = "screen",
    ) -> None:
        """Show the open page in another size, scheme or medium."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            media=medium,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise what it comes to."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def violations(self) -> list[str]:
        """Return what axe-core finds against WCAG 2.1 A and AA, each with where it found it."""
        source = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
        self.evaluate(f"{source};0")
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
        found = self.evaluate(
            f"axe.run(document, {{runOnly: {json.dumps(tags)}, resultTypes: ['violations']}})"
            ".then(r => r.violations.map(v => v.id + ': ' + v.help + ' ' + v.nodes.slice(0, 5)"
            ".map(n => n.html.slice(0, 160) + ' ' + n.any.map(c => c.message).join('; '))"
            ".join(' | ')))"
        )
        return [str(violation) for violation in found]

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """Write a PNG of the page, or of what the window shows of it."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """Print the page as it asks to be printed."""
        self.call("Emulation.setEmulatedMedia", media="print")
        made = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(made["data"]))
        return path
