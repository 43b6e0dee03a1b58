"""The environment variables of both processes, and of the API alone. worker/settings.py has the worker's."""

import os
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

from service import json_faults

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
NonBlank = Annotated[str, msgspec.Meta(min_length=1)]

# ADDRESS is what follows `scheme://` in a server's URL. It is checked here because libraries that parse it
# later quote what they reject, for example the part of a password before a `/`, as an invalid port.
_PORT = r":(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
_HOST = rf"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@,\[\]]+)({_PORT})?"
ADDRESS = rf"([^\s/?#]*@)?{_HOST}([/?]\S*)?\Z"
# There may be several hosts. There may be none, because `?host=` may name them.
_POSTGRES_ADDRESS = rf"([^\s/?#]*@)?({_HOST}(,{_HOST})*)?([/?]\S*)?\Z"

PostgresUrl = Annotated[str, msgspec.Meta(pattern=rf"\Apostgres(ql)?://{_POSTGRES_ADDRESS}")]

AppUrl = Annotated[str, msgspec.Meta(pattern=r"\Ahttps?://[^\s?#]+\Z")]

# With a plain host, and no password: the worker sends a secret there.
PublicUrl = Annotated[str, msgspec.Meta(pattern=rf"\Ahttps://[A-Za-z0-9.-]+({_PORT})?(/\S*)?\Z")]
# Errors in WWW-Authenticate show these two, so they must have no quote and no backslash.
TokenTypes = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9.+/-]+(, *[A-Za-z0-9.+/-]+)*\Z")]
ScopePrefix = Annotated[str, msgspec.Meta(pattern=r"\A[!#-\[\]-~]*\Z")]  # RFC 6749, section 3.3


# Shares of `database_timeout_seconds`. All code names durations `seconds`, and monotonic deadlines `until`.
CONNECT_SHARE = 0.8  # for connecting, so that it fails before the caller's deadline
QUEUE_SHARE = 0.5  # of any deadline, for waiting for a connection; later, too little time is left
JOIN_SHARE = 0.75  # that the leader of a group commit must have left for others to join
KEY_WAIT_SHARE = 0.4  # for a create to wait for another create with the same idempotency key


class InvalidSetting(Exception):
    """An environment variable is missing or invalid. Commands print the message and exit with status 1."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename="upper"):
    """The settings of both processes. Durations are in seconds."""

    database_url: PostgresUrl
    database_pool_size: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10
    database_timeout_seconds: Seconds = 1.0
    database_statement_cache_size: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 100
    host: NonBlank = "127.0.0.1"
    shutdown_seconds: Seconds = 20.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    otel_exporter_otlp_endpoint: Annotated[str, msgspec.Meta(pattern=rf"\Ahttps?://{ADDRESS}")] | None = None


class ServiceSettings(Settings, frozen=True, kw_only=True):
    """The settings of the API. It gets no broker address, because it publishes only through the outbox."""

    app_url: AppUrl
    request_secret_keys: NonBlank
    port: Port = 8000
    health_port: Port = 8002  # The worker's is 8001, so that both can run on one machine.
    # Longer than proxies keep connections, because a proxy that uses a connection as we close it answers 502.
    keep_alive_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 90
    auth_issuer: NonBlank
    auth_jwks_url: Annotated[str, msgspec.Meta(pattern=r"\A(https|file)://[^\s]+\Z")]
    # By default, access tokens are those of RFC 9068. Types and clients are separated by commas.
    auth_audience: NonBlank | None = None
    auth_token_types: TokenTypes = "at+jwt"  # noqa: S105 - no password
    auth_client_claim: NonBlank = "client_id"
    auth_clients: str = ""
    auth_internal_clients: str = ""
    auth_scope_claim: NonBlank = "scope"
    auth_scope_prefix: ScopePrefix = ""
    auth_leeway_seconds: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0

    def __post_init__(self) -> None:
        """Refuse a port for two servers, and settings that accept tokens for other services of the issuer."""
        if self.port == self.health_port:  # Granian would share it.
            raise ValueError(f"PORT and HEALTH_PORT are both {self.port}: change one of them")
        if self.auth_audience is None and not self.auth_clients.replace(",", " ").strip():
            raise ValueError("AUTH_AUDIENCE is missing: without it, AUTH_CLIENTS must list the clients")


class DatabaseSettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of a command that uses only Postgres."""

    database_url: PostgresUrl


class SecretKeySettings(msgspec.Struct, frozen=True, rename="upper"):
    """The settings of a command that makes a new secret."""

    request_secret_keys: NonBlank


AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


def load(kind: type[AnyStruct], environment: Mapping[str, str] = os.environ) -> AnyStruct:
    """Read settings. An empty variable counts as unset. Raises InvalidSetting, which shows no value."""
    given = {name: value for name, value in environment.items() if value}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        problem = json_faults.describe(error)
        problem = problem.replace("Object missing required field", "missing environment variable")
        problem = problem.replace(json_faults.NOT_ALLOWED, "this value is not as deploy/reference.md says")
        raise InvalidSetting(problem.removesuffix(", got a string")) from None
