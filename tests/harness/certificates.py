"""Certificates for servers of the tests, from an authority made for the test."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Issues certificates for servers on the loopback. Clients trust it with `file` as SSL_CERT_FILE."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / "authority.pem"
        own = self._about("Authority of the tests", self._key, days=3650)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(_SIGNS_CERTIFICATES, critical=True)
        self.file.write_bytes(own.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def server_context(self, *, days: float = 365, address: str = "127.0.0.1") -> ssl.SSLContext:
        """Return a context with a certificate that expires in *days*; a negative number: it has expired."""
        return context_with(self.certificate(days=days, address=address))

    def certificate(self, *, days: float = 365, address: str = "127.0.0.1") -> Path:
        """Return a file with such a certificate, and its key, which only the owner may read."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(address))])
        about = self._about("Server", key, days=days).add_extension(names, critical=False)
        certificate = about.sign(self._key, SHA256())
        file = self._folder / f"server-{certificate.serial_number}.pem"
        file.touch(mode=0o600)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        file.write_bytes(private + certificate.public_bytes(Encoding.PEM))
        return file

    def _about(self, subject: str, key: EllipticCurvePrivateKey, *, days: float) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        # Clients check strictly from Python 3.13 on: both identifiers have to be there.
        own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuers_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(_named(subject))
            .issuer_name(_named("Authority of the tests"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=3650))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(own_id, critical=False)
            .add_extension(issuers_id, critical=False)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def context_with(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


FAULTS = ("expired", "of another host", "of another authority")


def faulty_certificate(fault: str, authority: Authority, folder: Path) -> Path:
    """Return a certificate that clients who trust *authority* must refuse for this fault."""
    if fault == "expired":
        return authority.certificate(days=-1)
    if fault == "of another host":
        return authority.certificate(address="127.0.0.2")
    assert fault == "of another authority"
    (folder / "another").mkdir()
    return Authority(folder / "another").certificate()


def faulty_context(fault: str, authority: Authority, folder: Path) -> ssl.SSLContext:
    return context_with(faulty_certificate(fault, authority, folder))
