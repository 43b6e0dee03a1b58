"""The page at /schema in a browser: on a phone and on a desk it can be read, and calls tried out."""

import json
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import LOCAL
from service.contracts import openapi

pytest.importorskip("playwright", reason="Playwright is installed by `make test-long`")
from playwright.async_api import Page, ViewportSize, expect

from tests.harness import browser

pytestmark = pytest.mark.long

SCREENSHOTS = LOCAL / "screenshots"
SCREENS = {"phone": ViewportSize(width=390, height=844), "desk": ViewportSize(width=1280, height=800)}
DOCUMENT: dict[str, Any] = msgspec.to_builtins(openapi.document())
OPERATIONS = [
    (operation["tags"][0], operation["operationId"])
    for item in DOCUMENT["paths"].values()
    for operation in item.values()
]
CREATE = "#operations-requests-create_request"


@pytest.fixture(scope="module")
async def chromium():
    """A browser."""
    async with browser.running() as running:
        yield running


@pytest.fixture(params=SCREENS)
def screen(request):
    """A screen's name."""
    return request.param


@pytest.fixture
async def page(chromium, screen):
    """An empty page as large as the screen, whose console must stay free of errors."""
    async with browser.empty_page(chromium, SCREENS[screen]) as opened:
        yield opened


async def fits(page: Page) -> bool:
    """Whether nothing is wider than the screen."""
    return bool(await page.evaluate("document.documentElement.scrollWidth <= screen.width"))


async def test_page_and_operations_fit_the_screen_and_show_no_names_of_types(page, client, screen):
    await page.goto(f"{client.base_url}/schema")
    await expect(page.locator(".opblock")).to_have_count(len(OPERATIONS))
    await page.screenshot(path=SCREENSHOTS / f"api-{screen}.png", full_page=True)
    assert await fits(page)

    for tag, operation in OPERATIONS:
        await page.click(f"#operations-{tag}-{operation} .opblock-summary-control")
        await expect(page.locator(f"#operations-{tag}-{operation} .responses-table")).to_be_visible()
    await page.screenshot(path=SCREENSHOTS / f"operations-{screen}.png", full_page=True)
    assert await fits(page)

    # Every schema, with the objects in it.
    click_all = "(elements) => elements.forEach((element) => element.click())"
    await page.locator("[data-name=model]").evaluate_all(click_all)
    expand = page.locator(".json-schema-2020-12-expand-deep-button").get_by_text("Expand all")
    await expect(expand.first).to_be_visible()
    await expand.evaluate_all(click_all)
    await expect(page.locator("body")).to_contain_text("Waives the conveyancer", use_inner_text=True)
    await page.screenshot(path=SCREENSHOTS / f"schemas-{screen}.png", full_page=True)

    assert await fits(page)
    shown = await page.inner_text("body")
    assert "customer_email" in shown
    # These three are words that the page has for other reasons.
    names = {*DOCUMENT["components"]["schemas"]} - {"Meta", "Status", "Question"}
    assert [name for name in names if name in shown] == []


async def test_deep_link_opens_its_operation(page, client):
    await page.goto(f"{client.base_url}/schema#/requests/create_request")

    # Swagger UI scrolls to it.
    await page.wait_for_function(
        f"document.querySelector('{CREATE}.is-open')?.getBoundingClientRect().top < innerHeight / 2"
    )
    await expect(page.locator(".opblock.is-open")).to_have_count(1)


async def test_calls_can_be_tried_out(page, client, screen, issuer, database):
    await page.goto(f"{client.base_url}/schema")
    await page.click(".auth-wrapper .authorize")
    await page.fill(".auth-container input[type=text]", issuer.token())
    await page.click(".auth-container button.authorize")
    await page.click(".auth-container .btn-done")
    await page.click(f"{CREATE} .opblock-summary-control")
    await page.click(f"{CREATE} .try-out__btn")
    await page.click(f"{CREATE} .execute")
    response = page.locator(f"{CREATE} .live-responses-table .response")
    await expect(response).to_be_visible()
    await page.screenshot(path=SCREENSHOTS / f"tried-out-{screen}.png", full_page=True)

    assert await response.locator(".response-col_status").inner_text() == "200"
    answer = json.loads(await response.locator(".highlight-code code").first.inner_text())
    assert await fits(page)
    stored = await database.fetchrow("SELECT * FROM calculation_request")
    assert stored is not None
    assert stored["customer_email"] == answer["data"]["customer_email"]
    # No header was sent that its reader did not enter.
    sent = await page.inner_text(f"{CREATE} .curl-command")
    headers = {line.partition(":")[0].strip(" '") for line in sent.split("-H")[1:]}
    assert headers == {"accept", "Authorization", "Content-Type"}
    assert stored["idempotency_key"] is None
