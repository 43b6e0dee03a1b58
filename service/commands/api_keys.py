"""`api-key`: the keys that open only the questionnaire. The identity provider issues access tokens."""

import click

from service.authentication import api_keys
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record

api_key = click.Group("api-key", help="The keys that give access to the questionnaire.")


@api_key.command()
@click.argument("client", type=parameters.line)
@on_record
async def create(client: str, by: Operator) -> Answer:
    """Create an API key for the program CLIENT, and print it. It cannot be shown again."""
    async with connecting.postgres() as connection, connecting.bounded_transaction(connection):
        key = await api_keys.create(connection, client)
        _, prefix, _ = key.split("_", maxsplit=2)
        await operator_actions.record(connection, "api-key create", [(None, f"{prefix} of {client}")], by)
    return Answer({"key": key}, key)


@api_key.command("list")
@answering
async def list_keys() -> Answer:
    """Show the prefix and client of every API key, and when it was created and revoked."""
    async with connecting.postgres() as connection:
        return Answer.listing(await api_keys.list_all(connection))


@api_key.command()
@click.argument("prefix", type=parameters.line)
@on_record
async def revoke(prefix: str, by: Operator) -> Answer:
    """Revoke the API key with this prefix: the second part of cr_<prefix>_<secret>."""
    async with connecting.postgres() as connection, connecting.bounded_transaction(connection):
        if not await api_keys.revoke(connection, prefix):
            message = "No valid API key has this prefix: see `python -m service api-key list`."
            raise click.ClickException(message)
        await operator_actions.record(connection, "api-key revoke", [(None, prefix)], by)
    return Answer({"prefix": prefix}, f"{prefix} revoked")
