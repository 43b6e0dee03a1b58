"""`token`: an access token for development, signed with a local key."""

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.http import bearer
from tests.harness.processes import Ended


async def test_token_is_accepted(environment, client, issuer, tmp_path):
    key = tmp_path / "key.pem"
    key.write_bytes(issuer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    signed = await run("service", "token", CONVEYANCER, "--key", str(key), environment=environment)
    response = await client.post("/v1/request", json=A_REQUEST, headers=bearer(signed.output.strip()))

    assert signed.status == 0
    assert response.status_code == 200


async def test_key_that_cannot_sign_is_named_but_not_shown(environment, issuer, tmp_path):
    key = tmp_path / "key.pem"
    public = issuer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for unusable in (public, b"zqmark"):
        key.write_bytes(unusable)
        ended = await run("service", "token", CONVEYANCER, "--key", str(key), environment=environment)
        assert ended == Ended(1, "", f"--key {key}: not a readable EC P-256 private key\n")
