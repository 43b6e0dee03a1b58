"""The command line of the API and of its operators: `python -m service`."""

import argparse
import asyncio
import gc
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import asyncpg
import jwt
import msgspec
import structlog
import uvloop

from service.api import access_log
from service.app import create_app
from service.authentication import api_keys, authenticator
from service.calculation_requests import conveyancers
from service.calculation_requests.conveyancers import InvalidConveyancer, UnknownConveyancer
from service.commands import doctor
from service.contracts import asyncapi, compatibility, openapi
from service.postgres import outages, schema
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Connection
from service.postgres.schema import SchemaBusy
from service.server import http_server
from service.server.http_server import listen, stop_on_signals
from service.settings import DatabaseSettings, InvalidSetting, ServiceSettings, load
from service.telemetry import logs, tracing

Result = TypeVar("Result")

_OBJECTS_PER_COLLECTION = 10_000  # Most that requests leave behind is freed without a collection.


class UnknownApiKey(Exception):
    """There is no such valid key."""


class BreakingChange(Exception):
    """The events have changed in a way that breaks those who built on the document as it is."""


def main() -> int:
    """Run one command. Expected trouble is one line on standard error and exit status 1."""
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except (
        BreakingChange,
        InvalidConveyancer,
        InvalidSetting,
        PostgresUnavailable,
        SchemaBusy,
        UnknownApiKey,
        UnknownConveyancer,
    ) as error:
        return _fail(str(error) or error.__doc__ or "")
    except asyncpg.UndefinedTableError:
        return _fail("The database has no schema: run `python -m service schema apply` first.")
    except OSError as error:
        return _fail(str(error) or type(error).__name__)
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def serve(_: argparse.Namespace) -> None:
    """Serve the API until SIGTERM; requests under way are finished first."""
    settings = load(ServiceSettings)
    logs.configure(settings)
    with (
        tracing.exporting(settings, service="calculation-requests-api"),
        listen(settings.host, settings.port) as listening,
    ):
        gc.collect()
        gc.freeze()  # What is loaded stays: later collections need not look at it.
        gc.set_threshold(_OBJECTS_PER_COLLECTION)
        uvloop.run(_serve(settings, listening))


async def _serve(settings: ServiceSettings, listening: socket.socket) -> None:
    await http_server.serve(
        create_app(settings),
        listening,
        stop_on_signals(),
        refuse=access_log.refuse,
        shutdown_seconds=settings.shutdown_seconds,
        head_seconds=settings.http_head_seconds,
        body_seconds=settings.http_body_seconds,
    )


def openapi_print(_: argparse.Namespace) -> None:
    """Print the OpenAPI document."""
    print(msgspec.json.format(msgspec.json.encode(openapi.document())).decode())


def asyncapi_print(arguments: argparse.Namespace) -> None:
    """Print the AsyncAPI document, or write it over an older one unless that breaks consumers or senders."""
    document = asyncapi.document()
    written = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    if arguments.update is None:
        print(written)
        return
    if arguments.update.exists():
        broken = compatibility.breaks(msgspec.json.decode(arguments.update.read_bytes()), document)
        if broken:
            raise BreakingChange("\n".join((BreakingChange.__doc__ or "", *broken)))
    arguments.update.write_text(written + "\n")


def schema_apply(_: argparse.Namespace) -> None:
    """Apply the versions of the schema that the database lacks, while it is in use."""
    found = _with_connection(schema.apply)
    newer = f"; this release needs {schema.VERSION}" if found > schema.VERSION else ""
    print(f"schema version {found} applied{newer}")


def examine(arguments: argparse.Namespace) -> None:
    """Check the settings of the API and what they lead to; the exit status is 1 if anything fails."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # What is logged is also found.
    found = asyncio.run(
        doctor.examine_service(
            os.environ, processes=arguments.processes, timeout_seconds=arguments.timeout_seconds
        )
    )
    print(msgspec.json.encode(found).decode() if arguments.json else doctor.rendered(found))
    if not doctor.is_well(found):
        sys.exit(1)


def conveyancer_add(arguments: argparse.Namespace) -> None:
    """Register a conveyancer, or change a registered one."""
    _with_connection(
        lambda connection: conveyancers.add(
            connection,
            arguments.id,
            name=arguments.name,
            charges_calculation_fee=arguments.charges_calculation_fee,
        )
    )
    print(f"conveyancer {arguments.id} registered")


def conveyancer_list(_: argparse.Namespace) -> None:
    """Print every conveyancer: id, name, whether it charges a calculation fee."""
    for conveyancer_id, name, charges in _with_connection(conveyancers.list_all):
        print(conveyancer_id, name, "charges-calculation-fee" if charges else "no-fee", sep="\t")


def api_key_create(arguments: argparse.Namespace) -> None:
    """Print a new API key, which cannot be shown again."""
    print(_with_connection(lambda connection: api_keys.create(connection, arguments.conveyancer_id)))


def api_key_revoke(arguments: argparse.Namespace) -> None:
    """Revoke the API key with this prefix."""
    if not _with_connection(lambda connection: api_keys.revoke(connection, arguments.prefix)):
        raise UnknownApiKey
    print(f"{arguments.prefix} revoked")


def api_key_list(_: argparse.Namespace) -> None:
    """Print every API key: prefix, conveyancer, and when it was created, last used and revoked."""
    for key in _with_connection(api_keys.list_all):
        times = (key.created_at, key.last_used_at, key.revoked_at)
        shown = [f"{time:%Y-%m-%dT%H:%M:%SZ}" if time else "-" for time in times]
        print(key.prefix, key.conveyancer_id, *shown, sep="\t")


def token(arguments: argparse.Namespace) -> None:
    """Print a development access token, signed with a local key."""
    missing = [name for name in ("AUTH_ISSUER", "AUTH_AUDIENCE") if not os.environ.get(name)]
    if missing:
        raise InvalidSetting(f"missing environment variable `{missing[0]}`")
    issued_at = int(time.time())
    claims = {
        "iss": os.environ["AUTH_ISSUER"],
        "aud": os.environ["AUTH_AUDIENCE"],
        "sub": arguments.client_id,
        os.environ.get("AUTH_TENANT_CLAIM") or "client_id": arguments.client_id,
        "scope": arguments.scope,
        "iat": issued_at,
        "exp": issued_at + arguments.expires_in,
    }
    headers = {"typ": "at+jwt", "kid": arguments.key_id}
    try:
        print(jwt.encode(claims, arguments.key.read_text(), algorithm="ES256", headers=headers))
    except (OSError, ValueError, jwt.PyJWTError):
        raise InvalidSetting(f"--key {arguments.key}: cannot be read as an EC P-256 private key") from None


def _with_connection(work: Callable[[Connection], Awaitable[Result]]) -> Result:
    """Return what *work* returns. Raises PostgresUnavailable: an OSError from elsewhere is not its."""
    url = load(DatabaseSettings).database_url

    async def run() -> Result:
        connection: Connection = await asyncpg.connect(url, timeout=10)
        try:
            return await work(connection)
        finally:
            await connection.close(timeout=10)

    try:
        return asyncio.run(run())
    except outages.OUTAGE_ERRORS as error:
        reason = f"Postgres at DATABASE_URL cannot be reached ({type(error).__name__})."
        raise PostgresUnavailable(reason) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _command(commands, "serve", serve)
    _command(commands, "openapi", openapi_print)

    described = _command(commands, "asyncapi", asyncapi_print)
    described.add_argument("--update", type=Path, metavar="FILE")

    check = _command(commands, "doctor", examine)
    check.add_argument("--processes", type=int, default=1, metavar="N", help="that share Postgres; 1")
    check.add_argument("--timeout-seconds", type=float, default=doctor.TIMEOUT_SECONDS, metavar="SECONDS")
    check.add_argument("--json", action="store_true", help="for scripts")

    schemas = commands.add_parser("schema", help="The database schema.").add_subparsers(required=True)
    _command(schemas, "apply", schema_apply)

    conveyancer = commands.add_parser("conveyancer", help="The law firms.").add_subparsers(required=True)
    add = _command(conveyancer, "add", conveyancer_add)
    add.add_argument("id", help="the value of the tenant claim in the firm's access tokens")
    add.add_argument("--name", required=True)
    add.add_argument("--charges-calculation-fee", action=argparse.BooleanOptionalAction, default=False)
    _command(conveyancer, "list", conveyancer_list)

    api_key = commands.add_parser("api-key", help="Keys to the questionnaire.").add_subparsers(required=True)
    create = _command(api_key, "create", api_key_create)
    create.add_argument("conveyancer_id")
    _command(api_key, "list", api_key_list)
    revoke = _command(api_key, "revoke", api_key_revoke)
    revoke.add_argument("prefix", help="the second part of the key: cr_<prefix>_…")

    sign = _command(commands, "token", token)
    sign.add_argument("client_id", help="the conveyancer the token is for")
    sign.add_argument("--key", type=Path, required=True, help="PEM file of an EC P-256 private key")
    sign.add_argument("--key-id", default="local", help="its kid in the JWK set (default: local)")
    sign.add_argument("--scope", default=f"{authenticator.READ} {authenticator.WRITE}")
    sign.add_argument("--expires-in", type=int, default=3600, metavar="SECONDS")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], None],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
    command.set_defaults(run=run)
    return command


if __name__ == "__main__":
    sys.exit(main())
