"""`doctor`: what is wrong with the API and the servers that it needs."""

import os
from collections.abc import AsyncIterator, Mapping
from functools import partial

import click
import httpx

from service import diagnosis
from service.authentication.signing_keys import SigningKeys
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import Answer, answering
from service.diagnosis import Check, Finding, Reasons
from service.settings import ServiceSettings, examine

_REASONS: Reasons = {httpx.HTTPStatusError: "HTTP status {0.response.status_code}"}


@click.command()
@click.option("--watch", is_flag=True, help="Check again every five seconds.")
@answering
async def doctor(*, watch: bool) -> Answer:
    """Say what is wrong with the API, and what to do first. The exit status is 1 if anything is wrong.

    `python -m worker doctor` checks the queues, the events and the e-mails.
    """
    return await diagnosis.answer(partial(examine_service, os.environ), watch=watch)


async def examine_service(environment: Mapping[str, str]) -> list[Finding]:
    """Check everything that the API needs."""
    settings, problems = examine(ServiceSettings, environment)
    parsers = {"REQUEST_SECRET_KEYS": partial(SecretKeyRing.parse, settings.request_secret_keys)}
    do = "what does AUTH_JWKS_URL answer?"
    checks = (
        diagnosis.postgres_check(settings.database_url, settings.request_secret_keys),
        diagnosis.app_check(settings.app_url),
        Check("signing keys", ["AUTH_JWKS_URL"], partial(_signing_keys, settings), do, _REASONS),
    )
    return await diagnosis.diagnose(problems, parsers, checks)


async def _signing_keys(settings: ServiceSettings) -> AsyncIterator[Finding]:
    await SigningKeys(settings.auth_jwks_url).refresh()
    yield Finding("ok", "signing keys", "fetched, and at least one is usable")
