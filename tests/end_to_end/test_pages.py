"""The page at /schema in a browser: on a phone and on a desk it can be read, and calls tried out."""

import json
import re
from typing import Any

import msgspec
import pytest

from service import app

pytest.importorskip("playwright", reason="Playwright is installed by `make test-long`")
from playwright.async_api import Page, expect

from tests.harness.browser import SCREENS, SCREENSHOTS, faults, watched

pytestmark = pytest.mark.long

DOCUMENT: dict[str, Any] = msgspec.to_builtins(app.describe())
OPERATIONS = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
CREATE = "[id='post-/v1/request']"
MAIN = "rapi-doc [part=section-main-content]"


# The page's width and its colors have nothing to do with each other, so each appears in one of two readers.
@pytest.fixture(params=[("phone", "dark"), ("desk", "light")], ids="-".join)
def reader(request):
    """A reader's screen, and the color scheme of the reader's system."""
    return request.param


@pytest.fixture
async def page(chromium, reader, client):
    """The page as the reader sees it. Its console must stay empty, and it may load nothing from elsewhere."""
    screen, scheme = reader
    async with watched(chromium, SCREENS[screen], scheme) as (opened, requests):
        await opened.goto(f"{client.base_url}/schema")
        await expect(opened.locator(CREATE)).to_be_visible()
        yield opened
    assert {"/".join(url.split("/")[:3]) for url, _ in requests} == {str(client.base_url)}


async def check(page: Page, *name: str) -> None:
    """Check that nothing is wider than the window, and that axe finds nothing serious."""
    # The window is made as high as the page, because axe judges the contrast only of what is in the window.
    height = await page.locator(MAIN).evaluate("(main) => main.scrollHeight")
    assert page.viewport_size
    await page.set_viewport_size({"width": page.viewport_size["width"], "height": height + 100})
    await page.screenshot(path=SCREENSHOTS / f"{'-'.join(name)}.png")
    assert await page.locator(MAIN).evaluate("(main) => main.scrollWidth <= main.clientWidth")
    assert await faults(page) == []


async def test_text_is_readable_without_a_click_and_accessible_and_shows_no_names_of_types(page, reader):
    for operation in OPERATIONS:
        await expect(page.get_by_role("heading", name=operation["summary"], exact=True)).to_be_visible()
    await expect(page.locator(CREATE).get_by_text("Waives the conveyancer").first).to_be_visible()
    assert await page.get_by_text("customer_email").count()
    # The first three are words that the page has for other reasons. The last contains itself.
    names = {*DOCUMENT["components"]["schemas"]} - {"Meta", "Status", "Question", "ResponseOption"}
    assert [name for name in names if await page.get_by_text(name).count()] == []
    await check(page, "api", *reader)

    for example in await page.get_by_role("button", name="EXAMPLE", exact=True).all():
        await example.click()
    await check(page, "api-examples", *reader)


async def test_contents_lead_to_an_operation(page):
    # On a phone, ours are above the text. On a desk, RapiDoc's are beside it.
    contents = page.locator("[href='#post-/v1/request'], [data-content-id='post-/v1/request']")
    await expect(contents.locator("visible=true")).to_have_text(re.compile(r"^\s*POST\s+/v1/request\s*$"))
    await contents.locator("visible=true").click()

    await expect(page.locator(CREATE)).to_be_in_viewport()
    assert page.url.endswith("/schema#post-/v1/request")


async def test_calls_can_be_tried_out(page, reader, issuer, database):
    sent: list[Any] = []
    page.on("request", lambda each: sent.append(each))  # noqa: PLW0108 - Playwright takes no builtin
    await page.get_by_role("link", name="Authentication").click()
    await page.get_by_label("access token", exact=True).fill(issuer.token())
    await page.get_by_role("button", name="SET", exact=True).first.click()
    await expect(page.get_by_text("1 credential applied")).to_be_visible()
    for name in ("request secret", "API key"):
        await expect(page.get_by_label(name, exact=True)).to_be_visible()
    assert await page.get_by_text("HTTP Bearer").count() == 0
    await page.locator(CREATE).get_by_role("button", name="TRY", exact=True).click()
    await expect(page.get_by_text("Response Status: OK:200")).to_be_visible()
    await check(page, "tried-out", *reader)

    (create,) = sent
    stored = await database.fetchval("SELECT customer_email FROM calculation_request")
    assert stored == json.loads(create.post_data)["customer_email"]
    assert issuer.token() not in create.url
    kept = await page.evaluate("[Object.keys(localStorage), Object.keys(sessionStorage), document.cookie]")
    assert kept == [[], [], ""]
