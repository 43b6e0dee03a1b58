"""The command line of the API and of its operators: `python -m service`."""

import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # PID 1 ignores signals without a handler, and the imports below take seconds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

import click

from service.command_line.answering import run
from service.commands import conveyancers, development_token, doctor, documents, requests, schema, serve
from service.commands.api_keys import api_key
from service.server.http_server import ServerFailed

PROGRAM = click.Group(
    "python -m service",
    help="Serve the API, and operate it.",
    commands=[
        serve.serve,
        schema.schema,
        conveyancers.conveyancer,
        api_key,
        requests.request,
        doctor.doctor,
        documents.openapi,
        documents.asyncapi,
        development_token.token,
    ],
)


def main(words: Sequence[str]) -> int:
    """Run one command, and return the exit status."""
    return run(PROGRAM, words, expects=(ServerFailed,))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
