"""The page at /schema in a browser: on a phone and on a desk it can be read, and calls tried out."""

import json
import os
import shutil
from typing import Any

import msgspec
import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.folders import LOCAL
from service import app

pytest.importorskip("playwright", reason="Playwright is installed by `make test-long`")
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, ViewportSize, async_playwright, expect

pytestmark = pytest.mark.long

SCREENSHOTS = LOCAL / "screenshots"
SCREENS = {"phone": ViewportSize(width=390, height=844), "desk": ViewportSize(width=1280, height=800)}
DOCUMENT: dict[str, Any] = msgspec.to_builtins(app.describe())
OPERATIONS = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
CREATE = "[id='post-/v1/request']"
MAIN = "rapi-doc [part=section-main-content]"


TIMEOUT = 60_000  # milliseconds
NO_OTHER_HOST = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def program() -> dict[str, Any]:
    """Return Debian's Chromium, to be launched, and its environment. Raises LocalStackError."""
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


@pytest.fixture(scope="module")
async def chromium():
    """A browser without a window."""
    try:
        found = program()
    except LocalStackError as reason:
        pytest.skip(f"Chromium is missing: {reason}")
    expect.set_options(timeout=TIMEOUT)
    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(**found, args=[NO_OTHER_HOST]) as browser,
    ):
        yield browser


# The page's width and its colors have nothing to do with each other, so each appears in one of two readers.
@pytest.fixture(params=[("phone", "dark"), ("desk", "light")], ids="-".join)
def reader(request):
    """A reader's screen, and the color scheme of the reader's system."""
    return request.param


@pytest.fixture
async def page(chromium, reader, client):
    """The page as the reader sees it. Its console must stay empty, and it may load nothing from elsewhere."""
    lines: list[str] = []
    hosts: set[str] = set()
    screen, scheme = reader
    options = {"viewport": SCREENS[screen], "is_mobile": screen == "phone", "color_scheme": scheme}
    async with await chromium.new_context(**options) as context:
        context.set_default_timeout(TIMEOUT)
        opened = await context.new_page()
        opened.on("console", lambda message: lines.append(message.text))
        opened.on("request", lambda each: hosts.add("/".join(each.url.split("/")[:3])))
        await opened.goto(f"{client.base_url}/schema")
        await expect(opened.locator(CREATE)).to_be_visible()
        yield opened
        errors = await opened.page_errors(filter="all")
    assert (lines, errors, hosts) == ([], [], {str(client.base_url)})


async def show_all(page: Page) -> None:
    """Make the window as high as the page, because axe judges the contrast only of what is in the window."""
    height = await page.locator(MAIN).evaluate("(main) => main.scrollHeight")
    assert page.viewport_size
    await page.set_viewport_size({"width": page.viewport_size["width"], "height": height + 100})


async def check(page: Page, name: str) -> None:
    """Check that nothing is wider than the window, and that axe finds nothing serious."""
    await show_all(page)
    await page.screenshot(path=SCREENSHOTS / f"{name}.png")
    assert await page.locator(MAIN).evaluate("(main) => main.scrollWidth <= main.clientWidth")
    found = (await Axe().run(page)).response["violations"]
    assert [each for each in found if each["impact"] in {"serious", "critical"}] == []


async def test_text_is_readable_without_a_click_and_accessible_and_shows_no_names_of_types(page, reader):
    for operation in OPERATIONS:
        await expect(page.get_by_role("heading", name=operation["summary"], exact=True)).to_be_visible()
    await expect(page.locator(CREATE).get_by_text("Waives the conveyancer").first).to_be_visible()
    assert await page.get_by_text("customer_email").count()
    # The first three are words that the page has for other reasons. The last contains itself.
    names = {*DOCUMENT["components"]["schemas"]} - {"Meta", "Status", "Question", "ResponseOption"}
    assert [name for name in names if await page.get_by_text(name).count()] == []
    await check(page, "-".join(["api", *reader]))

    for example in await page.get_by_role("button", name="EXAMPLE", exact=True).all():
        await example.click()
    await check(page, "-".join(["api-examples", *reader]))


async def test_calls_can_be_tried_out(page, reader, issuer, database):
    sent: list[Any] = []
    page.on("request", lambda each: sent.append(each))  # noqa: PLW0108 - Playwright takes no builtin
    await page.get_by_role("button", name="Enter a token").click()
    await expect(page.locator("#security-scheme-access_token input")).to_be_focused()
    await page.keyboard.insert_text(issuer.token())
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("1 API key applied")).to_be_visible()
    await page.locator(CREATE).get_by_role("button", name="TRY", exact=True).click()
    await expect(page.get_by_text("Response Status: OK:200")).to_be_visible()
    await check(page, "-".join(["tried-out", *reader]))

    (create,) = sent
    stored = await database.fetchrow("SELECT * FROM calculation_request")
    assert stored is not None
    assert stored["customer_email"] == json.loads(create.post_data)["customer_email"]
    assert issuer.token() not in create.url
    # No header was sent that its reader did not enter.
    documented = {each["name"].lower() for each in DOCUMENT["components"]["parameters"].values()}
    assert not documented & {*create.headers}
    kept = await page.evaluate("[Object.keys(localStorage), Object.keys(sessionStorage), document.cookie]")
    assert kept == [[], [], ""]
