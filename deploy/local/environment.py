"""The environment of a local stack's processes, and of the shell of its user."""

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local import keys
from deploy.local.machine.folders import secret_in, write_private

_ISSUER = "https://issuer.calculation-requests.test"
_AUDIENCE = "calculation-requests"
_MAIL_FROM = "Calculations <no-reply@calculation-requests.test>"
# The API gets no broker and no mail server: the outbox is its only way out.
_NOT_FOR_THE_API = ("AMQP_URL", "SMTP_URL", "MAIL_FROM")
# The journey has what integrators have: no database, no signing key, and its own account on RabbitMQ.
_FOR_THE_JOURNEY = ("BASE_URL", "APP_URL", "ACCESS_TOKEN", "API_KEY", "MAIL_DIR", "CALCULATOR_AMQP_URL")
_FOR_PYTHON = ("LD_LIBRARY_PATH", "SSL_CERT_FILE")  # where it finds libraries and certificates
# With this variable, a later run in a shell that has sourced the file recognises values of an earlier run.
_MADE_HERE = "MADE_BY_MAKE_RUN"


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of the service's own processes, on the loopback interface."""

    api: int
    api_probes: int
    worker: int  # of its probes
    smtp: int
    journey: int


def variables(folder: Path, ports: Ports, *, database_url: str, amqp_url: str) -> dict[str, str]:
    """Return what processes, operators' commands and users need to reach a stack."""
    base_url = f"http://127.0.0.1:{ports.api}"
    return {
        "BASE_URL": base_url,
        "API_PROBES_URL": f"http://127.0.0.1:{ports.api_probes}",
        "WORKER_URL": f"http://127.0.0.1:{ports.worker}",
        "MAIL_DIR": str(folder / "mail"),
        "DATABASE_URL": database_url,
        "AMQP_URL": amqp_url,
        "SMTP_URL": f"smtp://127.0.0.1:{ports.smtp}",
        "MAIL_FROM": os.environ.get("MAIL_FROM") or _MAIL_FROM,
        "APP_URL": os.environ.get("APP_URL") or f"http://127.0.0.1:{ports.journey}",
        "REQUEST_SECRET_KEYS": f"{keys.KEY_ID}:{secret_in(folder / 'request-secret-key')}",
        "AUTH_ISSUER": _ISSUER,
        "AUTH_AUDIENCE": _AUDIENCE,
        "AUTH_JWKS_URL": (folder / "jwks.json").as_uri(),
    }


def of_api(variables: Mapping[str, str], ports: Ports) -> dict[str, str]:
    """Return the whole environment of the API process."""
    listening = {"HOST": "127.0.0.1", "PORT": str(ports.api), "HEALTH_PORT": str(ports.api_probes)}
    given = {**os.environ, **variables, **listening}
    return {name: value for name, value in given.items() if name not in _NOT_FOR_THE_API}


def of_worker(variables: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the whole environment of the worker process."""
    return {**os.environ, **variables, "HOST": "127.0.0.1", "HEALTH_PORT": str(port)}


def of_journey(variables: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the whole environment of the journey."""
    given = {**os.environ, **variables, "PORT": str(port)}
    return {name: given[name] for name in (*_FOR_THE_JOURNEY, "PORT", *_FOR_PYTHON) if name in given}


def write(file: Path, named: Mapping[str, str]) -> None:
    """Write a file that a shell can source: `. .local/env`."""
    made = [_digest(name, value) for name, value in named.items() if os.environ.get(name) != value]
    named = {**named, _MADE_HERE: " ".join(made)}
    write_private(file, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in named.items()))


def forget() -> None:
    """Remove from this process's environment what an earlier run made, because each run makes its own."""
    made = os.environ.pop(_MADE_HERE, "").split()
    for name, value in list(os.environ.items()):
        if _digest(name, value) in made:
            del os.environ[name]


def _digest(name: str, value: str) -> str:
    return hashlib.sha256(os.fsencode(f"{name}={value}")).hexdigest()[:16]
