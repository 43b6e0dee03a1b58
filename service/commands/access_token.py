"""`token`: an access token for development."""

import argparse
import os
import sys
import time
from pathlib import Path

import jwt

from service.authentication import authenticator
from service.commands.command import Subcommands, add_command
from service.settings import InvalidSetting


def add_to(commands: Subcommands) -> None:
    """Add the command to the parser."""
    command = add_command(commands, "token", sign)
    command.add_argument("client_id", help="the conveyancer that the token is for")
    command.add_argument("--key", type=Path, required=True, help="PEM file with an EC P-256 private key")
    command.add_argument("--key-id", default="local", help="kid of the key in the JWK set (default: local)")
    scopes = f"{authenticator.READ} {authenticator.WRITE}"
    command.add_argument("--scope", default=scopes, help=f"default: {scopes}")
    command.add_argument("--expires-in", type=int, default=3600, metavar="SECONDS", help="default: 3600")


def sign(arguments: argparse.Namespace) -> None:
    """Print an access token for development, signed with a local key."""
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
        token = jwt.encode(claims, arguments.key.read_text(), algorithm="ES256", headers=headers)
    except (OSError, ValueError, jwt.PyJWTError):
        raise InvalidSetting(f"--key {arguments.key}: not a readable EC P-256 private key") from None
    sys.stdout.write(f"{token}\n")
