"""Makes the certificates of a cluster: an authority, and what it signs.

Needs the package `cryptography`. What the names in a certificate mean is described in
`serving.net.internal_net`.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serving.net.internal_net import ROUTER_NAME, ROUTER_URI

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
"""Names of the machine itself, for `baton health` and clients there."""
EARLY: Final = datetime.timedelta(minutes=5)
"""Certificates begin to be valid a little earlier, because clocks differ."""


class Authority(NamedTuple):
    """A certificate that signs others, and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """The certificate, for those who shall trust it."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)


class Pair(NamedTuple):
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes


def new_authority(name: str = "Baton cluster", days: float = 3650) -> Authority:
    """Makes an authority.

    Args:
        name: its common name.
        days: how long it is valid.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    made = _builder(name, name, key, days)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = _usage(key_cert_sign=True, crl_sign=True)
    return Authority(made.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)


def issue(
    authority: Authority,
    names: Sequence[str],
    *,
    days: float = 365,
    from_now_days: float = 0,
) -> Pair:
    """Makes a certificate for both ends of a connection.

    Args:
        authority: signs it.
        names: DNS names, addresses and URIs; the first is its common name, too.
        days: how long it is valid.
        from_now_days: when that begins; negative: in the past.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    made = _builder(names[0], str(issuer), key, days, from_now_days)
    ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (ends, False),
        (identifier, False),
        (x509.SubjectAlternativeName([_general(name) for name in names]), False),
    )
    for extension, critical in extensions:
        made = made.add_extension(extension, critical=critical)
    signed = made.sign(authority.key, hashes.SHA256())
    return Pair(signed.public_bytes(serialization.Encoding.PEM), _pem(key))


def names_of_router(more: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of a router's certificate, and of its doors."""
    return (ROUTER_NAME, ROUTER_URI, *LOCAL_NAMES, *more)


def names_of_pool(pool: str) -> tuple[str, ...]:
    """Names of the certificate that the workers `POOL-...` share."""
    return (pool, f"{pool}-*", *LOCAL_NAMES)


def write_set(folder: Path, pools: Sequence[str], hosts: Sequence[str], days: float) -> list[Path]:
    """Writes certificates of a cluster: a router's, and one for each pool of workers.

    Each holder has a folder of its own with `ca.pem`, `cert.pem` and `key.pem`, so that it can be
    given that folder alone. The folder `authority` has the key that signs. If it is there already,
    it signs new certificates in place of the old.

    Args:
        folder: is made if it is missing.
        pools: a pool's workers are named `POOL-...`.
        hosts: names and addresses at which clients reach the router.
        days: how long the certificates are valid.

    Returns:
        The folders that were written.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the authority cannot be read.
    """
    authority = _authority_in(folder / "authority")
    sets = {"router": names_of_router(hosts)} | {pool: names_of_pool(pool) for pool in pools}
    for name, names in sets.items():
        made = issue(authority, names, days=days)
        _replace(
            folder / name, {"key.pem": made.key, "cert.pem": made.cert, "ca.pem": authority.pem}
        )
    return [folder / name for name in ("authority", *sets)]


def _authority_in(folder: Path) -> Authority:
    cert, key = folder / "ca.pem", folder / "key.pem"
    if not (cert.exists() or key.exists()):
        made = new_authority()
        _replace(folder, {"key.pem": _pem(made.key), "ca.pem": made.pem})
    signs = serialization.load_pem_private_key(key.read_bytes(), None)
    if not isinstance(signs, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key} is no key of an elliptic curve")
    return Authority(x509.load_pem_x509_certificate(cert.read_bytes()), signs)


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replaces files whole: a process that watches them reads no half. Keys are for their owner
    alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        mode = 0o600 if name == "key.pem" else 0o644
        fresh = folder / f".{name}.new"
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        fresh.replace(folder / name)


def _builder(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    days: float,
    from_now_days: float = 0,
) -> x509.CertificateBuilder:
    begin = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=from_now_days)
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(subject))
        .issuer_name(_common_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - EARLY)
        .not_valid_after(begin + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
