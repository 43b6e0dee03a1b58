"""`openapi` and `asyncapi`: the documents of the HTTP API and of the messages."""

import click
import msgspec

from service import app
from service.outbox import asyncapi as messages


@click.command()
def openapi() -> None:
    """Print the OpenAPI document of the HTTP API."""
    click.echo(msgspec.json.format(msgspec.json.encode(app.describe())).decode())


@click.command()
def asyncapi() -> None:
    """Print the AsyncAPI document of the messages."""
    click.echo(msgspec.json.format(msgspec.json.encode(messages.document())).decode())
