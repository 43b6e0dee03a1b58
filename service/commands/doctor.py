"""`doctor`: what is wrong with the API and the servers that it needs."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping

import click

from service.authentication.access_tokens import AccessTokens, InternalReader, InvalidCredentials
from service.authentication.signing_keys import SigningKeys
from service.calculation_requests.conveyancers import UnknownConveyancer, charges_calculation_fee
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import connecting, diagnosis
from service.command_line.answering import Answer, answering
from service.command_line.diagnosis import Finding
from service.settings import ServiceSettings, load


@click.command()
@click.option("--token", "judges_token", is_flag=True, help="Judge the access token on stdin instead.")
@answering
async def doctor(*, judges_token: bool) -> Answer:
    """Say what is wrong with the API, and what to do first. The exit status is 1 if anything is wrong.

    With --token, say whether the API accepts an access token: as which client, with which scopes, or why not.
    `python -m worker doctor` checks RabbitMQ and the mail server, too.
    """
    if judges_token:
        token = sys.stdin.read().strip()  # An argument would be in the list of processes.
        judging = _judge(load(ServiceSettings), token)
        do = "are AUTH_JWKS_URL and DATABASE_URL right?"
        return diagnosis.answer(await diagnosis.check("token", judging, do=do))
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
    await SigningKeys(settings.auth_jwks_url).refresh()
    yield Finding("ok", "signing keys", "fetched, and at least one is usable")


async def _judge(settings: ServiceSettings, token: str) -> AsyncIterator[Finding]:
    signing_keys = SigningKeys(settings.auth_jwks_url)
    await signing_keys.refresh()
    try:
        caller = AccessTokens(settings, signing_keys).verify(token)
    except InvalidCredentials as refused:
        yield Finding("wrong", "token", str(refused).rstrip("."))
        return
    if isinstance(caller, InternalReader):
        yield Finding("ok", "token", f"accepted as the internal reader {caller.client_id!a}")
        return
    says = f"accepted as the conveyancer {caller.conveyancer_id!a}, with "
    if caller.scopes:
        yield Finding("ok", "token", says + ", ".join(sorted(caller.scopes)))
    else:
        yield Finding("wrong", "token", says + "no scope of this service: it opens only the questionnaire")
    try:  # The API refuses most calls of firms that are not registered.
        async with connecting.postgres(settings.database_url) as connection:
            await charges_calculation_fee(connection, caller.conveyancer_id)
    except UnknownConveyancer:
        says = f"{caller.conveyancer_id!a} is not registered, or is disabled"
        yield Finding("wrong", "conveyancer", says, "look at `python -m service conveyancer list`")
    else:
        yield Finding("ok", "conveyancer", "registered")
