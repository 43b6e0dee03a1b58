"""Faults of the mail server: it refuses, is down, stalls, is slow, quotes links, dies."""

import asyncio
from unittest.mock import patch

from deploy.local.machine.ports import accepts
from tests.faults.catalogue.fault import fault
from tests.faults.world.world import World
from tests.harness.waiting import until

_SLOW_SECONDS = 15.0  # less than a process that was sent SIGTERM has for a reply
_HELD_SECONDS = 5.0


@fault("mail refused for now", "mail", repeats=False)
async def refuse_mail(world: World) -> bool:
    before = world.mail.commands["RCPT"]
    refusal = b"451 4.3.0 try again later"
    with patch.dict(world.mail.replies, {"RCPT": refusal, "content": refusal}):
        await asyncio.sleep(world.some_seconds())
    return world.mail.commands["RCPT"] > before


@fault("sender refused", "mail", "notifications", repeats=False)
async def refuse_sender(world: World) -> bool:
    """Every MAIL gets a 4xx, for long enough to see whether the connections are closed."""
    before, still_open = world.mail.commands["MAIL"], set()
    with patch.dict(world.mail.replies, {"MAIL": b"452 4.3.1 insufficient storage"}):
        await asyncio.sleep(2.0 + world.some_seconds())
        for _ in range(20):  # The least of a second: some may be being opened or closed at any moment.
            still_open.add(world.mail.open_connections)
            await asyncio.sleep(0.05)
    world.record.mail_connections = max(world.record.mail_connections, min(still_open))
    return world.mail.commands["MAIL"] > before


@fault("mail server quotes the link", "mail", repeats=False)
async def quote_link(world: World) -> bool:
    """Every reply to a content contains the customer's link."""
    before = len(world.mail.quoted)
    with patch.object(world.mail, "quotes", new=True):
        await asyncio.sleep(1.0 + world.some_seconds())
    return len(world.mail.quoted) > before


@fault("mail server slow during a SIGTERM", "mail", "notifications", repeats=False)
async def stop_amid_slow_acceptance(world: World) -> bool:
    """SIGTERM to a sender that waits for replies to contents, which the mail server has accepted."""
    sender = world.chance.choice(world.of_role("notifications"))
    world.mail.hold(sender.name, "content")
    try:
        is_held = await until(lambda: world.mail.held, seconds=_HELD_SECONDS)
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.restart())
            await asyncio.sleep(_SLOW_SECONDS)
            world.mail.release()
        return is_held
    finally:
        world.mail.release()


@fault("mail server dies after acceptance", "mail", repeats=False)
async def lose_mail_replies(world: World) -> bool:
    """The connection breaks after the e-mail is accepted and before the reply is sent."""
    before = len(world.record.acceptances)
    with patch.object(world.mail, "death_rate", world.chance.uniform(0.2, 1.0)):
        await asyncio.sleep(world.some_seconds(2.0))
    return any(not acceptance.answered for acceptance in world.record.acceptances[before:])


@fault("mail server down", "mail", repeats=False)
async def stop_mail_server(world: World) -> bool:
    world.mail.stop()
    try:
        await asyncio.sleep(world.some_seconds())
        return not accepts(world.mail.port)
    finally:
        await world.mail.start()


@fault("mail server stalled", "mail", repeats=False)
async def stall_mail(world: World) -> bool:
    """No command gets a reply until the end; then all do."""
    world.mail.stall()
    try:
        await asyncio.sleep(world.stall_seconds())
        return world.mail.held > 0
    finally:
        world.mail.release()
