"""An issuer's key server: real HTTPS, with an authority of its own, and whatever may be wrong with it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class HttpsIssuer:
    """Answers every request as `answer` says, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "authority.pem"  # for SSL_CERT_FILE
        self.answer: Answer = status(503)
        self.requests = 0
        self.port = 0
        self._certificate = folder / "certificate.pem"
        self._key = folder / "key.pem"
        _certify(self.authority, self._certificate, self._key)

    @property
    def url(self) -> str:
        """Where the keys are."""
        return f"https://127.0.0.1:{self.port}/jwks.json"

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Serve until the block is left; then nobody listens, and the next time it is at the same port."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._certificate, self._key)
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            await self.answer(writer)
            await writer.drain()
        writer.close()


def status(code: int, body: bytes = b"", *headers: str) -> Answer:
    """Answer with this status, body and further headers."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {code} Status", f"Content-Length: {len(body)}", "Connection: close", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return answer


def after(seconds: float, answer: Answer) -> Answer:
    """Answer late."""

    async def answer_late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        await answer(writer)

    return answer_late


async def drip(writer: asyncio.StreamWriter) -> None:
    """Begin an answer, and never come to its end."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def pour(writer: asyncio.StreamWriter) -> None:
    """Answer with a body that has no end."""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" " * 65_536)
        await writer.drain()


async def babble(writer: asyncio.StreamWriter) -> None:
    """Answer with what is not HTTP."""
    writer.write(b"\x00\xff nonsense\r\n\r\n")


def _certify(authority_file: Path, certificate_file: Path, key_file: Path) -> None:
    """Write the certificate of a new authority, and a certificate for 127.0.0.1 that it has signed."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("authority of a test")
    authority = (
        _certificate(authority_name, authority_key.public_key(), issuer=authority_name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _certificate(_name("issuer of a test"), key.public_key(), issuer=authority_name)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    authority_file.write_bytes(authority.public_bytes(Encoding.PEM))
    certificate_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, *, issuer: x509.Name
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
    )
