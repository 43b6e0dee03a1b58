"""The page at /schema, and the pages of `make run`, in a browser: on a phone, on a desk, by keyboard."""

import json
import re
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from service import app

pytest.importorskip("playwright", reason="Playwright is installed by `make test-long`")
from playwright.async_api import Locator, Page, expect

from tests.end_to_end.parties import EVENTS, JourneyStack, link_in
from tests.harness.browser import SCREENS, SCREENSHOTS, faults, watched

pytestmark = pytest.mark.long

DOCUMENT: dict[str, Any] = msgspec.to_builtins(app.describe())
CREATE = "[id='post-/v1/request']"
MAIN = "rapi-doc [part=section-main-content]"


# The page's width and its colors have nothing to do with each other, so each appears in one of two readers.
@pytest.fixture(params=[("phone", "dark"), ("desk", "light")], ids="-".join)
async def page(request, chromium, client):
    """The page as the reader sees it. Its console must stay empty, and it may load nothing from elsewhere."""
    screen, scheme = request.param
    async with watched(chromium, SCREENS[screen], scheme) as (opened, requests):
        await opened.goto(f"{client.base_url}/schema")
        await expect(opened.locator(CREATE)).to_be_visible()
        yield opened
    assert {"/".join(url.split("/")[:3]) for url, _ in requests} == {str(client.base_url)}


async def check(page: Page, name: str) -> None:
    """Check that nothing is wider than the window, and that axe finds nothing serious."""
    assert page.viewport_size
    width = page.viewport_size["width"]
    # The window is made as high as the page, because axe judges the contrast only of what is in the window.
    height = await page.locator(MAIN).evaluate("(main) => main.scrollHeight")
    await page.set_viewport_size({"width": width, "height": height + 100})
    await page.screenshot(path=SCREENSHOTS / f"{name}-{width}.png")
    assert await page.locator(MAIN).evaluate("(main) => main.scrollWidth <= main.clientWidth")
    assert await faults(page) == []


async def test_text_is_readable_without_a_click_and_accessible_and_shows_no_names_of_types(page):
    for operation in (each for item in DOCUMENT["paths"].values() for each in item.values()):
        await expect(page.get_by_role("heading", name=operation["summary"], exact=True)).to_be_visible()
    await expect(page.locator(CREATE).get_by_text("Waives the conveyancer").first).to_be_visible()
    assert await page.get_by_text("customer_email").count()
    # The first three are words that the page has for other reasons. The last contains itself.
    names = {*DOCUMENT["components"]["schemas"]} - {"Meta", "Status", "Question", "ResponseOption"}
    assert [name for name in names if await page.get_by_text(name).count()] == []
    await check(page, "api")

    for example in await page.get_by_role("button", name="EXAMPLE", exact=True).all():
        await example.click()
    await check(page, "api-examples")


async def test_contents_lead_to_an_operation(page):
    # On a phone, ours are above the text. On a desk, RapiDoc's are beside it.
    contents = page.locator("[href='#post-/v1/request'], [data-content-id='post-/v1/request']")
    await expect(contents.locator("visible=true")).to_have_text(re.compile(r"^\s*POST\s+/v1/request\s*$"))
    await contents.locator("visible=true").click()

    await expect(page.locator(CREATE)).to_be_in_viewport()
    assert page.url.endswith("/schema#post-/v1/request")


async def test_calls_can_be_tried_out(page, issuer, database):
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
    await check(page, "tried-out")

    (create,) = sent
    stored = await database.fetchval("SELECT customer_email FROM calculation_request")
    assert stored == json.loads(create.post_data)["customer_email"]
    assert issuer.token() not in create.url
    kept = await page.evaluate("[Object.keys(localStorage), Object.keys(sessionStorage), document.cookie]")
    assert kept == [[], [], ""]


async def click(_: Page, target: Locator) -> None:
    """Press with the mouse or a finger."""
    await target.click()


async def by_keyboard(page: Page, target: Locator) -> None:
    """Press with the keyboard: Tab until the target has the focus, then Enter."""
    await expect(target).to_be_visible()
    for _ in range(100):
        await page.keyboard.press("Tab")
        with suppress(AssertionError):
            await expect(target).to_be_focused(timeout=50)
            await page.keyboard.press("Enter")
            return
    raise AssertionError(f"{target} cannot be reached with Tab")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


async def click_through(journey: JourneyStack, page: Page, press: Any, look: Any) -> list[str]:
    """Press on until the firm has its calculation, and return the events that it sees."""
    await page.goto(journey.pages.base_url)
    await look(page, "firm")
    await page.get_by_label("E-mail address").fill("perm-fail@example.test")
    await press(page, button(page, "Send"))
    await expect(button(page, "Correct the address")).to_be_visible()
    await look(page, "failed")
    await press(page, button(page, "Correct the address"))
    link = page.frame_locator("iframe").get_by_role("link")
    await expect(link).to_be_visible()
    await look(page, "inbox")
    async with page.context.expect_page() as opened:
        await press(page, link)
    form = await opened.value
    await expect(button(form, "Continue")).to_be_visible()
    await look(form, "form")
    while not await button(form, "Send the answers").is_visible():
        async with form.expect_navigation():
            await press(form, button(form, "Continue"))
    await press(form, button(form, "Send the answers"))
    await expect(form.get_by_role("heading", name="Thank you")).to_be_visible()
    await look(form, "thanks")
    await page.bring_to_front()  # In a hidden tab, a click may reach what was there before it scrolled.
    if await page.get_by_role("link", name="Look again").is_visible():  # only without scripts
        await press(page, page.get_by_role("link", name="Look again"))
    await expect(button(page, "Announce the calculation")).to_be_visible()
    await look(page, "calculation")
    await press(page, button(page, "Announce the calculation"))
    await expect(page.get_by_text("Done: the firm has its calculation.")).to_be_visible()
    await look(page, "done")
    created = page.get_by_role("link", name="created")
    await expect(created).to_have_count(1)  # Before the style sheet comes, the line for phones has it, too.
    await press(page, created)
    await expect(page.get_by_text('"type": "request.created"')).to_be_in_viewport()
    return await page.locator(".feed b").all_inner_texts()


@pytest.mark.parametrize(
    ("screen", "scheme", "press", "scripts"),
    [
        *((screen, scheme, click, True) for screen in SCREENS for scheme in ("light", "dark")),
        ("desk", "light", by_keyboard, True),
        ("desk", "light", click, False),
    ],
)
async def test_journey_works_on_any_screen_and_is_accessible_and_the_secret_stays_where_it_is(
    *, journey, chromium, screen, scheme, press, scripts
):
    sources: list[str] = []

    async def look(page: Page, name: str) -> None:
        sources.append(page.url + await page.content())
        await expect(page.get_by_role("banner")).to_have_text(
            "A stand-in for another team. Not part of the product."
        )
        if scripts:
            await expect(page.locator("h1, section.now h2").last).to_be_in_viewport()
            await page.screenshot(path=SCREENSHOTS / f"journey-{name}-{screen}-{scheme}.png")
            assert await page.evaluate("document.documentElement.scrollWidth <= screen.width")
            assert await faults(page) == []

    async with watched(chromium, SCREENS[screen], scheme, scripts=scripts) as (page, requests):
        events = await click_through(journey, page, press, look)
        link = link_in(await page.frame_locator("iframe").locator("html").inner_html())

    secret = link.partition("?secret=")[2]
    assert secret
    assert events == EVENTS
    assert not any(secret in text for text in (*sources, journey.logs))
    assert [url for url, _ in requests if secret in url] == [link]
    assert not any(secret in referer for _, referer in requests)
    assert {url.split("/")[2] for url, _ in requests} == {link.split("/")[2]}
