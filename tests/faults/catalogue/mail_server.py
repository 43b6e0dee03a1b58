"""Faults of the mail server: it refuses, is down, stalls, dies after accepting, hangs up."""

import asyncio
from typing import Any

from tests.faults.catalogue.fault import fault
from tests.faults.world.world import World


async def _while_set(world: World, attribute: str, value: Any, seconds: float) -> None:
    """Let the mail server behave otherwise for some time."""
    usual = getattr(world.mail, attribute)
    setattr(world.mail, attribute, value)
    try:
        await asyncio.sleep(seconds)
    finally:
        setattr(world.mail, attribute, usual)


@fault("mail refused for now", "mail", repeats=False)
async def refuse_mail(world: World) -> None:
    """Every e-mail gets a 4xx."""
    await _while_set(world, "refusal", b"451 4.3.0 try again later", world.some_seconds())


@fault("mail server dies after acceptance", "mail", repeats=False)
async def lose_mail_replies(world: World) -> None:
    """The connection breaks after the e-mail is accepted and before the reply is sent."""
    await _while_set(world, "death_rate", world.chance.uniform(0.2, 1.0), world.some_seconds(2.0))


@fault("mail server hangs up", "mail", repeats=False)
async def hang_up_mail(world: World) -> None:
    """The mail server closes every connection before the content: after its reply to RCPT, or to DATA."""
    command = world.chance.choice(("RCPT", "DATA"))
    await _while_set(world, "hangs_up_after", command, world.some_seconds())


@fault("mail server down", "mail", repeats=False)
async def stop_mail_server(world: World) -> None:
    """Every connection breaks, and connecting fails."""
    world.mail.stop()
    try:
        await asyncio.sleep(world.some_seconds())
    finally:
        await world.mail.start()


@fault("mail server stalled", "mail", repeats=False)
async def stall_mail(world: World) -> None:
    """No command gets a reply until the end; then all do."""
    world.mail.stall()
    try:
        await asyncio.sleep(world.stall_seconds())
    finally:
        world.mail.resume()
