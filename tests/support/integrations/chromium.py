# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Headless Chromium, told what to do over two pipes (the DevTools protocol)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

# It reads what it is told from descriptor 3, and answers on 4; messages end in a zero.
AS_3_AND_4 = 'exec "$@" 3<&"$READS" 4>&"$WRITES"'
# Away from 3, 4 and those that a shell takes for itself.
HIGH = 100
END = b"\0"
# Only this host is looked up: a page that needs another one fails here, too.
ARGUMENTS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"),
    *("--disable-extensions", "--window-size=1280,1024"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


class Chromium:
    """One browser with one page."""

    def __init__(self, program: str, folder: Path) -> None:
        """Starts it; ``folder`` is where it may write. ``attach`` comes next."""
        ends = [*os.pipe(), *os.pipe()]
        reads, self._told, self._answers, writes = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, HIGH) for end in ends
        )
        for end in ends:
            os.close(end)
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *ARGUMENTS, *root, f"--user-data-dir={folder / 'profile'}"]
        environment = {**os.environ, "READS": str(reads), "WRITES": str(writes)}
        environment |= {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", AS_3_AND_4, "bash", *command, "about:blank"],
                env=environment,
                pass_fds=(reads, writes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(reads)
        os.close(writes)
        self._log = folder / "chromium.log"
        self._numbers = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._document = ""

    def attach(self) -> None:
        """Opens the page and asks to be told what happens on it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        # So that the end of its load is not taken for that of the first page asked for.
        self.until("document.readyState === 'complete'", "the empty page")

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            os.close(self._told)
            os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._numbers += 1
        said = {"id": self._numbers, "method": method, "params": parameters}
        if self._session is not None:
            said["sessionId"] = self._session
        os.write(self._told, json.dumps(said).encode() + END)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            message = self._message(deadline, method)
            if message.get("id") == self._numbers:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def open(self, url: str) -> None:
        """Goes to a page and waits until all that it needs is loaded."""
        self.events.clear()
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, (url, found["errorText"])
        if "loaderId" not in found:  # another place of the page that is open
            return
        self._document = found["loaderId"]
        deadline = time.monotonic() + PATIENCE_S
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.events.append(self._message(deadline, f"the load of {url}"))

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript on the page, awaited if it is a promise."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in found, (expression, found)
        return found["result"].get("value")

    def type(self, text: str) -> None:
        """Presses the keys of a text, one after another, where the focus is."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def until(self, expression: str, what: str) -> Any:
        """Waits until JavaScript on the page says something true; that."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.evaluate(expression)):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {PATIENCE_S} s: {what}")
            time.sleep(0.05)
        return found

    def failures(self) -> list[str]:
        """What went wrong since the page was opened: answers, loads and scripts.

        What the page before had still asked for ends when that is left: no failure.
        """
        found = []
        mine = set()
        for event in self.events:
            about = event.get("params", {})
            if event["method"] == "Network.requestWillBeSent":
                if about["loaderId"] == self._document:
                    mine.add(about["requestId"])
            elif event["method"] == "Network.responseReceived":
                answer = about["response"]
                if about["requestId"] in mine and answer["status"] >= 400:
                    found.append(f"{answer['status']} {answer['url']}")
            elif event["method"] == "Network.loadingFailed":
                if about["requestId"] in mine:
                    found.append(f"{about['type']}: {about['errorText']}")
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
        return found

    def _message(self, deadline: float, what: str) -> dict[str, Any]:
        while END not in self._rest:
            left = deadline - time.monotonic()
            ready = select.select([self._answers], [], [], max(left, 0))[0]
            data = os.read(self._answers, 1 << 16) if ready else b""
            if not data:
                said = self._log.read_text(errors="replace")[-2000:]
                pytest.fail(f"Chromium does not answer to {what}:\n{said}")
            self._rest += data
        text, _, self._rest = self._rest.partition(END)
        message: dict[str, Any] = json.loads(text)
        return message
