"""Make a key that signs access tokens, and publish its public half."""  # noqa: INP001 - a file of a ConfigMap

import json
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from jwt.algorithms import ECAlgorithm

folder = Path(sys.argv[1])
key = ec.generate_private_key(ec.SECP256R1())
(folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
public = {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "local", "use": "sig", "alg": "ES256"}
(folder / "jwks.json").write_text(json.dumps({"keys": [public]}))
