"""The journey of `make run` in a browser: on any screen, by keyboard, without scripts, and through faults."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tests.end_to_end.journeys import EVENTS, EVENTS_AFTER_A_FAILURE, JourneyStack, link_in, secret_of

pytest.importorskip("playwright", reason="Playwright is installed by `make test-long`")
from playwright.async_api import FrameLocator, Locator, Page, expect

from tests.harness.browser import SCREENS, SCREENSHOTS, faults, watched

pytestmark = pytest.mark.long

DESK = SCREENS["desk"]
BANNER = "A stand-in for another team. Not part of the product."
DONE = "Done: the firm has its calculation."

Press = Callable[[Page, Locator], Awaitable[None]]
Look = Callable[[Page, str], Awaitable[None]]


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


async def look_away(_page: Page, _name: str) -> None:
    """Check nothing."""


def in_email(page: Page) -> FrameLocator:
    return page.frame_locator("iframe")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


async def open_link(page: Page, press: Press = click) -> Page:
    """Press the link in the e-mail; return the tab that it opens."""
    async with page.context.expect_page() as opened:
        await press(page, in_email(page).get_by_role("link"))
    return await opened.value


async def click_through(
    journey: JourneyStack, page: Page, *, press: Press = click, look: Look = look_away, address: str = ""
) -> list[str]:
    """Press on until the firm has its calculation, and return the events that it sees."""
    await page.goto(journey.pages.base_url)
    await look(page, "firm")
    if address:
        await page.get_by_label("E-mail address").fill(address)
    await press(page, button(page, "Send"))
    if address:
        await expect(button(page, "Correct the address")).to_be_visible()
        await look(page, "failed")
        await press(page, button(page, "Correct the address"))
    await expect(in_email(page).get_by_role("link")).to_be_visible()
    await look(page, "inbox")
    form = await open_link(page, press)
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
    await expect(page.get_by_text(DONE)).to_be_visible()
    await look(page, "done")
    created = page.get_by_role("link", name="created")
    await expect(created).to_have_count(1)  # Before the style sheet comes, the line for phones has it, too.
    await press(page, created)
    await expect(page.get_by_text('"type": "request.created"')).to_be_in_viewport()
    return await page.locator(".feed b").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
async def test_journey_works_on_any_screen_and_is_accessible_and_the_secret_stays_where_it_is(
    journey, chromium, screen, scheme
):
    sources: list[str] = []

    async def look(page: Page, name: str) -> None:
        await expect(page.locator("h1, section.now h2").last).to_be_in_viewport()
        await page.screenshot(path=SCREENSHOTS / f"journey-{name}-{screen}-{scheme}.png")
        assert await page.evaluate("document.documentElement.scrollWidth <= screen.width")
        await expect(page.get_by_role("banner")).to_have_text(BANNER)
        assert await faults(page) == []
        sources.append(page.url + await page.content())

    async with watched(chromium, SCREENS[screen], scheme) as (page, requests):
        events = await click_through(journey, page, look=look, address="perm-fail@example.test")
        link = link_in(await in_email(page).locator("html").inner_html())

    secret = secret_of(link)
    assert secret
    assert events == EVENTS_AFTER_A_FAILURE
    assert not any(secret in text for text in (*sources, journey.logs))
    assert [url for url, _ in requests if secret in url] == [link]
    assert not any(secret in referer for _, referer in requests)
    assert {url.split("/")[2] for url, _ in requests} == {link.split("/")[2]}


@pytest.mark.parametrize(("press", "scripts"), [(by_keyboard, True), (click, False)])
async def test_keyboard_is_enough_and_scripts_are_not_needed(journey, chromium, press, scripts):
    async with watched(chromium, DESK, scripts=scripts) as (page, _):
        assert await click_through(journey, page, press=press) == EVENTS
