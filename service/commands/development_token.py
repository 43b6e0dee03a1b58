"""`token`: an access token for development."""

import os
import time
from pathlib import Path

import click
import jwt

from service.authentication import access_tokens
from service.settings import InvalidSetting


@click.command()
@click.argument("client_id")
@click.option(
    "--key", type=click.Path(path_type=Path), required=True, help="PEM file with an EC P-256 private key."
)
@click.option("--key-id", default="local", show_default=True, help="The kid of the key in the JWK set.")
@click.option("--scope", default=f"{access_tokens.READ} {access_tokens.WRITE}", show_default=True)
@click.option("--expires-in", type=int, default=3600, show_default=True, metavar="SECONDS")
def token(client_id: str, key: Path, key_id: str, scope: str, expires_in: int) -> None:
    """Print an access token for development, for the conveyancer CLIENT_ID, signed with a local key."""
    for name in ("AUTH_ISSUER", "AUTH_AUDIENCE"):
        if not os.environ.get(name):
            raise InvalidSetting(f"missing environment variable {name}")
    issued_at = int(time.time())
    claims = {
        "iss": os.environ["AUTH_ISSUER"],
        "aud": os.environ["AUTH_AUDIENCE"],
        "sub": client_id,
        os.environ.get("AUTH_CLIENT_CLAIM") or "client_id": client_id,
        "scope": scope,
        "iat": issued_at,
        "exp": issued_at + expires_in,
    }
    headers = {"typ": "at+jwt", "kid": key_id}
    try:
        signed = jwt.encode(claims, key.read_text(), algorithm="ES256", headers=headers)
    except (OSError, ValueError, TypeError, AttributeError, jwt.PyJWTError):  # encrypted, or a public key
        raise click.ClickException(f"--key {key}: not a readable EC P-256 private key") from None
    click.echo(signed)
