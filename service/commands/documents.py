"""`openapi` and `asyncapi`: the documents of the HTTP API and of the messages."""

from pathlib import Path

import click
import msgspec

from service.contracts import asyncapi as messages
from service.contracts import compatibility
from service.contracts import openapi as http


@click.command()
def openapi() -> None:
    """Print the OpenAPI document of the HTTP API."""
    click.echo(msgspec.json.format(msgspec.json.encode(http.document())).decode())


@click.command()
@click.option(
    "--update", type=click.Path(path_type=Path), help="Replace this file unless the change is breaking."
)
def asyncapi(update: Path | None) -> None:
    """Print the AsyncAPI document of the messages, or update a file with it."""
    document = messages.document()
    text = msgspec.json.format(msgspec.json.encode(document)).decode()
    if update is None:
        click.echo(text)
        return
    if update.exists():
        broken = compatibility.breaks(msgspec.json.decode(update.read_bytes()), document)
        if broken:
            raise click.ClickException("The change breaks consumers or senders: " + "; ".join(broken))
    update.write_text(f"{text}\n")
