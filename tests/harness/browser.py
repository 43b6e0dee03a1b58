"""Debian's Chromium without a window, driven by Playwright."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, ViewportSize, async_playwright, expect

from deploy.local.machine import packages
from deploy.local.machine.folders import LOCAL
from tests.harness.programs import skip_without

SCREENSHOTS = LOCAL / "screenshots"
SCREENS = {"phone": ViewportSize(width=390, height=844), "desk": ViewportSize(width=1280, height=800)}
_TIMEOUT = 60_000  # milliseconds
_NO_OTHER_HOST = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@asynccontextmanager
async def running() -> AsyncIterator[Browser]:
    """Run the browser until the block is left. Skips the test where there is none."""
    with skip_without("Chromium"):
        program = _program()
    expect.set_options(timeout=_TIMEOUT)
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(**program, args=[_NO_OTHER_HOST]) as browser,
    ):
        yield browser


@asynccontextmanager
async def watched(
    browser: Browser, screen: ViewportSize, scheme: Literal["light", "dark"], *, scripts: bool = True
) -> AsyncIterator[tuple[Page, list[tuple[str, str]]]]:
    """Open an empty page; yields URLs and Referers of all tabs, too. No console of a tab may have a line."""
    requests: list[tuple[str, str]] = []
    lines: list[str] = []
    is_phone = screen["width"] < 600
    async with await browser.new_context(
        viewport=screen, is_mobile=is_phone, color_scheme=scheme, java_script_enabled=scripts
    ) as context:
        context.set_default_timeout(_TIMEOUT)
        context.on("request", lambda each: requests.append((each.url, each.headers.get("referer", ""))))
        context.on("console", lambda message: lines.append(message.text))
        context.on("weberror", lambda error: lines.append(str(error.error)))
        yield await context.new_page(), requests
    assert lines == []


async def faults(page: Page) -> list[Any]:
    """Return what axe finds that is serious or critical."""
    found = (await Axe().run(page)).response["violations"]
    return [each for each in found if each["impact"] in {"serious", "critical"}]


def _program() -> dict[str, Any]:
    """Return the program to launch, and its environment. Raises LocalStackError if there is none."""
    installed = shutil.which("chromium")
    if installed:
        return {"executable_path": installed}
    root = packages.unpacked("chromium")
    libraries = [packages.library_path(root), *map(str, root.glob("usr/lib/*/pulseaudio"))]
    return {
        # Not its script in /usr/bin, which would start the installed one.
        "executable_path": root / "usr/lib/chromium/chromium",
        "env": {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)},
    }
