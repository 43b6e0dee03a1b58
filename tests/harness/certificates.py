"""Certificates for servers of the tests, from an authority made for the test."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import trustme


class Authority:
    """Issues certificates for servers on the loopback. Clients trust it with `file` as SSL_CERT_FILE."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def server_context(self, *, address: str = "127.0.0.1") -> ssl.SSLContext:
        return context_with(self.certificate(address=address))

    def certificate(self, *, days: float = 365, address: str = "127.0.0.1") -> Path:
        """Return a file with a certificate that expires in *days*, and its key, for the owner alone."""
        issued = self._authority.issue_cert(address, not_after=datetime.now(UTC) + timedelta(days=days))
        file = self._folder / f"server-{uuid4()}.pem"
        file.touch(mode=0o600)
        issued.private_key_and_cert_chain_pem.write_to_path(file)
        return file


def context_with(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


FAULTS = ("expired", "of another host", "of another authority")


def faulty_certificate(fault: str, authority: Authority, folder: Path) -> Path:
    """Return a certificate that clients who trust *authority* must refuse for this fault."""
    (folder / "another").mkdir()
    expired, elsewhere = authority.certificate(days=-1), authority.certificate(address="127.0.0.2")
    faulty = (expired, elsewhere, Authority(folder / "another").certificate())
    return dict(zip(FAULTS, faulty, strict=True))[fault]
