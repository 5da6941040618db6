"""A certificate for development: made on request, kept in a folder, good for this machine only."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk.plain import make_folders
from penstock.net.private import replace_private
from penstock.net.tls import TlsFiles

__all__ = ["make_development_certificate"]


def make_development_certificate(
    folder: str,
    names: Sequence[str] = ("localhost", "127.0.0.1", "::1"),
    *,
    days: int = 365,
    clock: Clock = SYSTEM_CLOCK,
) -> TlsFiles:
    """Return the files of a self-signed certificate in ``folder``; those that are there already are used again.

    A client believes it when it is given ``development.pem`` as its CA.  The key is readable by its owner only.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = make_development_certificate(folder)
    ...     sorted(os.listdir(folder)), files == make_development_certificate(folder)
    (['development.key', 'development.pem'], True)
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    files = TlsFiles(certificate=os.path.join(folder, "development.pem"), key=os.path.join(folder, "development.key"))
    if os.path.exists(files.certificate) and os.path.exists(files.key):
        return files
    make_folders(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    now = dt.datetime.fromtimestamp(clock.now_ns() / 1e9, dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    replace_private(files.key, pem)  # first: a certificate is only there once its key is
    replace_private(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    return files


def _general_name(name: str):  # type: ignore[no-untyped-def]
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
