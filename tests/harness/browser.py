"""Debian's Chromium without a window, driven over the DevTools protocol through a pair of pipes."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from tests.harness.waiting import eventually

_ANSWER_SECONDS = 60.0
_STOP_SECONDS = 10.0
_LARGEST_MESSAGE = 64 * 1024**2
# The browser reads commands from descriptor 3, and writes answers and events to 4.
_WITH_PIPES = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh"]
_OPTIONS = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot have; the pages are our own
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--ignore-certificate-errors",  # of the servers of the tests
]


class Tab:
    """A page in the browser, as large as a screen."""

    def __init__(self, browser: "Browser", session: str, *, width: int) -> None:
        self._browser = browser
        self._session = session
        self.width = width
        self.errors: list[str] = []  # of its console

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the page, and return the answer."""
        return await self._browser.send(method, session=self._session, **parameters)

    def note(self, method: str, event: dict[str, Any]) -> None:
        """Keep an event if it is an error in the console."""
        level = event["entry"]["level"] if method == "Log.entryAdded" else event.get("type")
        if method == "Runtime.exceptionThrown" or level in {"error", "assert"}:
            self.errors.append(json.dumps(event))

    async def open(self, url: str) -> None:
        """Load a page."""
        opened = await self.send("Page.navigate", url=url)
        assert "errorText" not in opened, opened
        await self.shows("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def shows(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        await eventually(lambda: self.evaluate(f"Boolean(document.body && ({expression}))"), seconds=20)

    async def click(self, selector: str) -> None:
        """Click the middle of the first element that matches and can be seen."""
        found = f"""
            [...document.querySelectorAll({json.dumps(selector)})]
                .find((element) => element.checkVisibility())"""
        await self.shows(found)
        x, y = await self.evaluate(f"""(() => {{
            const element = {found};
            element.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def fill(self, selector: str, text: str) -> None:
        """Replace the text of an input field."""
        await self.click(selector)
        await self.evaluate("document.activeElement.select()")
        await self.send("Input.insertText", text=text)

    async def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))


class Browser:
    """A running browser."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def send(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return the answer."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        message = await asyncio.wait_for(answer, _ANSWER_SECONDS)
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    async def read(self) -> None:
        """Read answers and events until the browser ends."""
        assert self._process.stdout is not None
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._process.stdout.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._answers.pop(message["id"]).set_result(message)
                elif message.get("sessionId") in self._tabs:
                    self._tabs[message["sessionId"]].note(message["method"], message["params"])

    async def new_tab(self, *, width: int, height: int) -> Tab:
        """Open an empty page of this size, which has nothing stored."""
        context = await self.send("Target.createBrowserContext")
        target = await self.send("Target.createTarget", url="about:blank", **context)
        session = (await self.send("Target.attachToTarget", flatten=True, **target))["sessionId"]
        tab = self._tabs[session] = Tab(self, session, width=width)
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await tab.send("Emulation.setDeviceMetricsOverride", **size)
        return tab


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Browser]:
    """Run the browser until the block is left. Skips the test where there is none."""
    try:
        command = _command()
    except LocalStackError as reason:
        pytest.skip(f"Chromium is missing: {reason}")
    with (folder / "browser.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(*_WITH_PIPES, *command, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            limit=_LARGEST_MESSAGE,
            start_new_session=True,
        )
    browser = Browser(process)
    reading = asyncio.create_task(browser.read())
    try:
        yield browser
        await browser.send("Browser.close")
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        reading.cancel()


def _command() -> Sequence[str]:
    """Return the command. Raises LocalStackError if there is none."""
    installed = shutil.which("chromium")
    if installed:
        return [installed]
    root = packages.unpacked("chromium", report=print)
    # Not by its script in /usr/bin, which would start the installed one.
    libraries = [packages.library_path(root), *map(str, root.glob("usr/lib/*/pulseaudio"))]
    return ["env", f"LD_LIBRARY_PATH={':'.join(libraries)}", f"{root}/usr/lib/chromium/chromium"]
