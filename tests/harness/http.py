"""What the tests' HTTP clients have in common."""

import ssl
from typing import Final

# For plain HTTP. By default every client loads the authorities that the machine trusts, which takes 20 ms.
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
