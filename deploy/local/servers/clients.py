"""The servers' own clients, psql and rabbitmqctl, and the account of a calculation team."""

import json
import shlex

from yarl import URL

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, secret_in, write_private
from deploy.local.machine.processes import run_command
from deploy.local.servers.server import Server, trouble_of_rabbitmq

_IMPORT_SECONDS = 60.0
_CALCULATOR = "calculator"
RIGHTS = {  # as in worker/README.md
    "configure": r"^calculator(\..+)?$",
    "write": r"^(calculations|calculator(\..+)?)$",
    "read": r"^(calculation-requests|calculator(\..+)?)$",
}


def write(place: Place, name: str, server: Server) -> None:
    """Write the script `bin/NAME`, which runs the client at *server*, unless the server is the user's own."""
    script = place.folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.unlink(missing_ok=True)
    if server.client:
        write_private(script, f'#!/bin/sh\nexec {shlex.join(map(str, server.client))} "$@"\n')
        script.chmod(0o700)


def account_of_calculator(place: Place, amqp_url: str) -> dict[str, str]:
    """Make the account `calculator`, unless it exists, and return its URL as CALCULATOR_AMQP_URL."""
    password = secret_in(place.folder / "calculator-password")
    url = str(URL(amqp_url).with_user(_CALCULATOR).with_password(password))
    if trouble_of_rabbitmq(url):
        user = {"name": _CALCULATOR, "password": password, "tags": ""}
        permissions = {"user": _CALCULATOR, "vhost": "/", **RIGHTS}
        definitions = place.folder / "calculator-definitions.json"
        write_private(definitions, json.dumps({"users": [user], "permissions": [permissions]}))
        importing = ["sh", "-c", 'bin/rabbitmqctl import_definitions <"$0"', str(definitions)]
        try:
            run_command("rabbitmqctl", importing, folder=place.folder, seconds=_IMPORT_SECONDS)
        except LocalStackError as error:  # For example, the command `docker` is not installed.
            place.report(f"The account {_CALCULATOR} cannot be made: {error}")
            return {}
    return {"CALCULATOR_AMQP_URL": url}
