"""The page at /schema in a browser: on a phone and on a desk it can be read, and calls tried out."""

import json
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import LOCAL
from service.contracts import openapi
from tests.harness import browser
from tests.harness.browser import Tab

pytestmark = pytest.mark.long

SCREENSHOTS = LOCAL / "screenshots"
SCREENS = {"phone": (390, 844), "desk": (1280, 800)}
DOCUMENT: dict[str, Any] = msgspec.to_builtins(openapi.document())
OPERATIONS = [
    (operation["tags"][0], operation["operationId"])
    for item in DOCUMENT["paths"].values()
    for operation in item.values()
]
CREATE = "#operations-requests-create_request"


@pytest.fixture(scope="module")
async def chromium(tmp_path_factory):
    """A browser."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    async with browser.running(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(params=SCREENS)
def screen(request):
    """A screen's name."""
    return request.param


@pytest.fixture
async def tab(chromium, screen):
    """An empty page as wide as the screen."""
    width, height = SCREENS[screen]
    return await chromium.new_tab(width=width, height=height)


async def fits(tab: Tab) -> bool:
    """Whether nothing is wider than the screen."""
    return bool(await tab.evaluate(f"document.documentElement.scrollWidth <= {tab.width}"))


async def test_page_and_operations_fit_the_screen_and_show_no_names_of_types(tab, client, screen):
    await tab.open(f"{client.base_url}/schema")
    await tab.shows(f"document.querySelectorAll('.opblock').length === {len(OPERATIONS)}")
    await tab.screenshot(SCREENSHOTS / f"api-{screen}.png")
    assert await fits(tab)

    for tag, operation in OPERATIONS:
        await tab.click(f"#operations-{tag}-{operation} .opblock-summary-control")
        await tab.shows(f"document.querySelector('#operations-{tag}-{operation} .responses-table')")
    await tab.screenshot(SCREENSHOTS / f"operations-{screen}.png")
    assert await fits(tab)

    # Every schema, with the objects in it.
    await tab.evaluate("document.querySelectorAll('[data-name=model]').forEach((tab) => tab.click())")
    await tab.shows("document.querySelector('.json-schema-2020-12')")
    await tab.evaluate(
        "[...document.querySelectorAll('.json-schema-2020-12-expand-deep-button')]"
        ".filter((expand) => expand.innerText === 'Expand all').forEach((expand) => expand.click())"
    )
    await tab.shows("document.body.innerText.includes('Waives the conveyancer')")
    await tab.screenshot(SCREENSHOTS / f"schemas-{screen}.png")

    assert await fits(tab)
    shown = await tab.evaluate("document.body.innerText")
    assert "customer_email" in shown
    # These three are words that the page has for other reasons.
    names = {*DOCUMENT["components"]["schemas"]} - {"Meta", "Status", "Question"}
    assert [name for name in names if name in shown] == []
    assert tab.errors == []


async def test_deep_link_opens_its_operation(tab, client):
    await tab.open(f"{client.base_url}/schema#/requests/create_request")

    opened = f"document.querySelector('{CREATE}.is-open')"
    # Swagger UI scrolls to it.
    await tab.shows(f"{opened} && {opened}.getBoundingClientRect().top < innerHeight / 2")
    assert await tab.evaluate("document.querySelectorAll('.opblock.is-open').length") == 1


async def test_calls_can_be_tried_out(tab, client, screen, issuer, database):
    await tab.open(f"{client.base_url}/schema")
    await tab.click(".auth-wrapper .authorize")
    await tab.fill(".auth-container input[type=text]", issuer.token())
    await tab.click(".auth-container button.authorize")
    await tab.click(".auth-container .btn-done")
    await tab.click(f"{CREATE} .opblock-summary-control")
    await tab.click(f"{CREATE} .try-out__btn")
    await tab.click(f"{CREATE} .execute")
    shown = f"document.querySelector('{CREATE} .live-responses-table .response')"
    await tab.shows(shown)
    await tab.screenshot(SCREENSHOTS / f"tried-out-{screen}.png")

    assert await tab.evaluate(f"{shown}.querySelector('.response-col_status').innerText") == "200"
    answer = json.loads(await tab.evaluate(f"{shown}.querySelector('.highlight-code code').innerText"))
    assert await fits(tab)
    assert tab.errors == []
    stored = await database.fetchrow("SELECT * FROM calculation_request")
    assert stored is not None
    assert stored["customer_email"] == answer["data"]["customer_email"]
    # No header was sent that its reader did not enter.
    sent = await tab.evaluate(f"document.querySelector('{CREATE} .curl-command').innerText")
    headers = {line.partition(":")[0].strip(" '") for line in sent.split("-H")[1:]}
    assert headers == {"accept", "Authorization", "Content-Type"}
    assert stored["idempotency_key"] is None
