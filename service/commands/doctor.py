"""`doctor`: what is wrong with the API and the servers that it needs."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping

import click

from service.authentication.signing_keys import OTHER_USE, SigningKeys
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import diagnosis
from service.command_line.answering import Answer, answering
from service.command_line.diagnosis import Finding
from service.settings import ServiceSettings, load


@click.command()
@answering
async def doctor() -> Answer:
    """Say what is wrong with the API, and what to do first. The exit status is 1 if anything is wrong.

    `python -m worker doctor` checks RabbitMQ and the mail server, too.
    """
    return diagnosis.answer(await examine_service(os.environ))


async def examine_service(environment: Mapping[str, str]) -> list[Finding]:
    """Check everything that the API needs. Raises InvalidSetting."""
    settings = load(ServiceSettings, environment)
    ring = SecretKeyRing.parse(settings.request_secret_keys)
    of_postgres, of_signing_keys = await asyncio.gather(
        diagnosis.check("postgres", diagnosis.postgres(settings, ring), do=diagnosis.POSTGRES_DO),
        diagnosis.check("signing keys", _signing_keys(settings), do="what does AUTH_JWKS_URL answer?"),
    )
    return of_postgres + of_signing_keys


async def _signing_keys(settings: ServiceSettings) -> AsyncIterator[Finding]:
    keys = SigningKeys(settings.auth_jwks_url)
    try:
        await keys.refresh()
        yield Finding("ok", "signing keys", "fetched, and at least one is usable")
    finally:
        if faults := {key_id: why for key_id, why in keys.unused.items() if why != OTHER_USE}:
            yield Finding("warning", "signing keys", f"not usable: {faults}", "ask the issuer to mend them")
