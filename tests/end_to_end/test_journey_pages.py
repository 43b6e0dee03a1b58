"""The journey of `make run` in a browser: on any screen, by keyboard, without scripts, and through faults."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tests.end_to_end.journeys import EVENTS, JourneyStack, link_in, secret_of
from tests.harness.command_line import run
from tests.harness.waiting import eventually

pytest.importorskip("playwright", reason="Playwright is installed by `make test-long`")
from playwright.async_api import FrameLocator, Locator, Page, expect

from tests.harness.browser import SCREENS, SCREENSHOTS, empty_page, faults, watched

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
    """Press the link in the e-mail, and return the tab that it opens."""
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
    assert events == [EVENTS[0], "request.email_failed", "request.corrected", *EVENTS[1:]]
    assert not any(secret in text for text in (*sources, journey.logs))
    assert [url for url, _ in requests if secret in url] == [link]
    assert not any(secret in referer for _, referer in requests)
    assert {url.split("/")[2] for url, _ in requests} == {link.split("/")[2]}


async def test_keyboard_is_enough(journey, chromium):
    async with watched(chromium, DESK) as (page, _):
        assert await click_through(journey, page, press=by_keyboard) == EVENTS


async def test_scripts_are_not_needed(journey, chromium):
    async with watched(chromium, DESK, scripts=False) as (page, _):
        assert await click_through(journey, page) == EVENTS


async def test_double_click_and_reload_are_one_request_and_one_email(journey, chromium, database):
    async with watched(chromium, DESK) as (page, _):
        await page.goto(journey.pages.base_url)
        await button(page, "Send").dblclick()
        await expect(in_email(page).get_by_role("link")).to_be_visible()
        await page.reload()
        await expect(in_email(page).get_by_role("link")).to_be_visible()

    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1
    assert len([*journey.mails.iterdir()]) == 1


async def test_page_waits_while_the_worker_is_dead_and_then_goes_on(journey, chromium):
    async with watched(chromium, DESK) as (page, _):
        await page.goto(journey.pages.base_url)
        await journey.worker.kill()
        await button(page, "Send").click()
        await expect(page.get_by_text("Waiting for the e-mail")).to_be_visible()
        journey.worker.start()
        await journey.worker.becomes_ready()
        await expect(in_email(page).get_by_role("link")).to_be_visible()


async def test_new_secret_invalidates_the_old_link_and_its_email_opens_the_form(
    journey, chromium, environment
):
    lines: list[str] = []
    async with empty_page(chromium, DESK) as page:
        page.on("console", lambda message: lines.append(message.text))
        page.on("pageerror", lambda error: lines.append(str(error)))
        await page.goto(journey.pages.base_url)
        await button(page, "Send").click()
        await expect(in_email(page).get_by_role("link")).to_be_visible()
        old_link = link_in(await in_email(page).locator("html").inner_html())
        form = await open_link(page)
        await expect(button(form, "Continue")).to_be_visible()
        uuid = page.url.partition("#")[0].rpartition("/")[2]
        replaced = await run("service", "request", "new-secret", uuid, environment=environment)
        await eventually(lambda: len([*journey.mails.glob("*.eml")]) == 2)
        refused = await form.goto(old_link)
        sentence = await form.locator("main p").inner_text()
        assert await faults(form) == []
        await page.reload()
        await page.get_by_role("heading", name="The customer gets an e-mail").click()
        form = await open_link(page)
        await expect(button(form, "Continue")).to_be_visible()

    assert lines == []
    assert replaced.status == 0
    assert refused is not None
    assert refused.status == 401
    assert sentence.startswith("This link is not valid, or no longer valid.")
