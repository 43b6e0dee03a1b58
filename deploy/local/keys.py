"""The signing key of a local stack's access tokens."""

import json
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from deploy.local.machine.folders import write_private

KEY_ID = "local"


def write_signing_key(private: Path, public: Path) -> None:
    """Make the ES256 key that signs access tokens, unless it exists, and write its public part."""
    if not private.exists():
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(private, pem.decode())
    key = serialization.load_pem_private_key(private.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{private} is not an EC key")
    jwk = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    public.write_text(json.dumps({"keys": [{**jwk, "kid": KEY_ID, "use": "sig", "alg": "ES256"}]}))
