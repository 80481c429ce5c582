"""Certificates that are good for the test that makes them only."""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_HOUR = dt.timedelta(hours=1)


class Pair(NamedTuple):
    """A certificate and its key, in PEM form."""

    cert: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """Write both into files and return their paths."""
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(self.cert)
        key.write_bytes(self.key)
        key.chmod(0o600)
        return str(cert), str(key)


class Authority:
    """Makes certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._name, self._key.public_key(), expired=False)
        certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.cert = certificate.public_bytes(serialization.Encoding.PEM)
        """The authority's own certificate, in PEM form."""

    def server(self, *, expired: bool = False) -> Pair:
        """Make a certificate for this machine's loopback."""
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        return self._make("server", names, expired=expired)

    def client(self, name: str | None = "client", *, dns: Sequence[str] = (), expired: bool = False) -> Pair:
        """Make a client's certificate with a common name and alternative names."""
        return self._make(name, [x509.DNSName(text) for text in dns], expired=expired)

    def _make(self, name: str | None, names: list[x509.GeneralName], *, expired: bool) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._name, key.public_key(), expired=expired)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )


def encrypted(key: bytes, passphrase: bytes) -> bytes:
    """Put a key under a passphrase."""
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase),
    )


def _name(name: str | None) -> x509.Name:
    return x509.Name([] if name is None else [x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, expired: bool
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _HOUR)
        .not_valid_after(now - _HOUR if expired else now + _HOUR)
    )
