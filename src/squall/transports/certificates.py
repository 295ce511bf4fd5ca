"""Certificates of a run: one root, an authority a machine, and a certificate with its name for each process.

Whoever holds the root's key decides which machines belong to the run, and a machine's nursery names the processes that
it forks. Keys never leave the machine that made them, except that of a machine's authority, which goes to it over a
connection that is encrypted and authenticated.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the group of P-256
CLOCKS_DIFFER = timedelta(days=2)  # between machines
VALID = timedelta(days=3650)  # a run may be resumed, and long


@dataclass(frozen=True)
class Identity:
    """A name with its key, and the certificates that prove it; as PEM."""

    name: str
    key: bytes
    chain: bytes  # its own certificate, then those of whoever issued it, without the root's
    root: bytes

    @classmethod
    def new_root(cls, name: str, secret: str | None = None) -> Identity:
        """Of a run, with a new key, or with that which follows from a secret. Its chain is empty: it is the root."""
        key = ec.generate_private_key(ec.SECP256R1()) if secret is None else _derived_key(secret)
        root = _certificate(name, key.public_key(), name, key, x509.BasicConstraints(ca=True, path_length=1))
        return cls(name, _pem(key), b"", root)

    def issue(self, name: str, *, authority: bool = False) -> Identity:
        """A new identity that this one vouches for; an `authority` may issue others, which may not."""
        own = load_pem_private_key(self.key, password=None)
        assert isinstance(own, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        limits = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
        certificate = _certificate(name, key.public_key(), self.name, own, limits)
        return Identity(name, _pem(key), certificate + self.chain, self.root)

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """For a client and for a server: TLS 1.3, and each end proves that it belongs to the run."""
        client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client.check_hostname = False  # names are those of processes, and looked at by `names_of`
        server.num_tickets = 0
        for context in (client, server):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=self.root.decode())
            _load(context, self.key + self.chain)
        return client, server

    def reception(self) -> ssl.SSLContext:
        """For a server to which strangers come, who prove nothing yet; it proves that it has this root's key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        _load(context, self.key + self.root)
        return context


def _load(context: ssl.SSLContext, key_and_chain: bytes) -> None:
    """OpenSSL reads keys from files alone: this one is in memory."""
    file = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        os.write(file, key_and_chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def call_reception(raw: socket.socket, expected: str) -> ssl.SSLSocket:
    """Encrypt a connection to a server of which the fingerprint of its key is known, and nothing else.

    It takes as long as the socket's timeout says. Raises `OSError`, and `ValueError` if the server is another one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = context.wrap_socket(raw)
    certificate = connection.getpeercert(binary_form=True) or b""  # the handshake has proved that its key is there
    if _fingerprint(x509.load_der_x509_certificate(certificate).public_key()) != expected:
        connection.close()
        raise ValueError("the certificate is another one")
    return connection


def machine_name(number: int) -> str:
    """Of a machine's authority."""
    return f"machine-{number}"


def names_of(connection: ssl.SSLSocket) -> tuple[str, str]:
    """The name that the peer's certificate proves, and that of who vouches for it; the handshake is over."""
    certificate: dict[str, Any] = connection.getpeercert() or {}
    return _common_name(certificate.get("subject", ())), _common_name(certificate.get("issuer", ()))


def _common_name(parts: Any) -> str:
    """Empty where there is none, or several."""
    names = [value for part in parts for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else ""


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of the public key of a certificate in PEM, in hexadecimal digits."""
    return _fingerprint(x509.load_pem_x509_certificate(certificate).public_key())


def _fingerprint(key: Any) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _derived_key(secret: str) -> ec.EllipticCurvePrivateKey:
    """A key on P-256: 384 bits are made of the secret, so that no key is likelier than another (FIPS 186-5, A.2.1)."""
    bits = HKDF(SHA384(), 48, salt=None, info=b"squall root key").derive(secret.encode())
    return ec.derive_private_key(1 + int.from_bytes(bits) % (_ORDER - 1), ec.SECP256R1())


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, issuer: str, issuers_key: ec.EllipticCurvePrivateKey,
    limits: x509.BasicConstraints,
) -> bytes:  # fmt: skip
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=_name(issuer), subject_name=_name(name), public_key=key,
        serial_number=x509.random_serial_number(), not_valid_before=now - CLOCKS_DIFFER, not_valid_after=now + VALID,
    )  # fmt: skip
    certificate = builder.add_extension(limits, critical=True).sign(issuers_key, SHA256())
    return certificate.public_bytes(Encoding.PEM)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
