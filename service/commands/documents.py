"""`openapi` and `asyncapi`: the documents of the HTTP API and of the messages."""

import click
import msgspec

from service.contracts import asyncapi as messages
from service.contracts import openapi as http


@click.command()
def openapi() -> None:
    """Print the OpenAPI document of the HTTP API."""
    click.echo(msgspec.json.format(msgspec.json.encode(http.document())).decode())


@click.command()
def asyncapi() -> None:
    """Print the AsyncAPI document of the messages."""
    click.echo(msgspec.json.format(msgspec.json.encode(messages.document())).decode())
