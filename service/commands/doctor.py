"""`doctor`: whether the API has what it needs."""

import os
from collections.abc import Mapping
from functools import partial

import click
import httpx

from service import diagnosis
from service.authentication.signing_keys import SigningKeys, SigningKeysUnavailable
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import COUNT, POSITIVE, Answer, answering
from service.diagnosis import TIMEOUT_SECONDS, Check, Finding, Findings, postgres_check
from service.settings import ServiceSettings, examine


@click.command()
@click.option("--processes", type=COUNT, default=1, show_default=True, help="Processes that share Postgres.")
@click.option("--timeout-seconds", type=POSITIVE, default=int(TIMEOUT_SECONDS), help="For each check.")
@answering
async def doctor(processes: int, timeout_seconds: int) -> Answer:
    """Check the settings of the API and the servers they name. Exit status 1 if any check fails."""
    findings = await examine_service(os.environ, processes=processes, timeout_seconds=timeout_seconds)
    return Answer(findings, diagnosis.rendered(findings), status=diagnosis.exit_status(findings))


async def examine_service(
    environment: Mapping[str, str], *, processes: int, timeout_seconds: float
) -> list[Finding]:
    """Check what the API needs; *processes* is the number of those that share Postgres."""
    settings, problems = examine(ServiceSettings, environment)
    parsers = {"REQUEST_SECRET_KEYS": partial(SecretKeyRing.parse, settings.request_secret_keys)}
    checks = (
        postgres_check(settings, connections=processes * settings.database_pool_size),
        Check(
            "signing keys",
            ["AUTH_JWKS_URL"],
            partial(_signing_keys, settings),
            (SigningKeysUnavailable,),
            "what does AUTH_JWKS_URL answer?",
            _reason,
        ),
    )
    return await diagnosis.diagnose(problems, parsers, checks, timeout_seconds=timeout_seconds)


async def _signing_keys(settings: ServiceSettings) -> Findings:
    await SigningKeys(settings.auth_jwks_url).refresh()
    return [Finding("ok", "signing keys", "fetched, and at least one is usable")]


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, httpx.HTTPStatusError):
        return f"HTTP status {cause.response.status_code}"
    return diagnosis.reason(cause)
