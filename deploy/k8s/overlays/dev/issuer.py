"""Write the made-up key that signs access tokens, and its public half."""  # noqa: INP001 - a file of a ConfigMap

import json
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from jwt.algorithms import ECAlgorithm

folder = Path(sys.argv[1])
# The same in every pod, so that tokens outlast a pod. It is as public as the overlay's passwords.
key = ec.derive_private_key(int.from_bytes(b"made-up-key-for-development-only"), ec.SECP256R1())
(folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
public = {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "local", "use": "sig", "alg": "ES256"}
(folder / "jwks.json").write_text(json.dumps({"keys": [public]}))
