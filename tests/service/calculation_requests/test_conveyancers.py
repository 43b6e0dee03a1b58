"""Registering conveyancers."""

import pytest

from service.calculation_requests import conveyancers
from service.calculation_requests.conveyancers import Conveyancer, InvalidConveyancer
from service.postgres.pool import Connection


async def test_conveyancer_with_an_unreadable_id_or_name_is_refused(database: Connection) -> None:
    before = await conveyancers.list_all(database)

    for text in ("", " ", "\u200b", "\u3164", "firm\u202e", "fi\nrm", "fi\0rm", "fi\udcffrm", "x" * 256):
        for conveyancer_id, name in ((text, "New Firm"), ("new-firm", text)):
            with pytest.raises(InvalidConveyancer):
                await conveyancers.register(
                    database, conveyancer_id, name=name, charges_calculation_fee=False
                )

    assert await conveyancers.list_all(database) == before


async def test_id_and_name_of_255_characters_are_accepted(database: Connection) -> None:
    await conveyancers.register(database, "x" * 255, name="é" * 255, charges_calculation_fee=False)

    longest = Conveyancer("x" * 255, "é" * 255, charges_calculation_fee=False, disabled_at=None)
    assert longest in await conveyancers.list_all(database)
