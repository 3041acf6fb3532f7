"""Keys for a trial: a certificate authority, the server's certificate, and a key pair for each site.

The authority signs once and its private key is not kept: nobody can make a second certificate that sites believe.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstill.core.errors import SettingError
from fedstill.core.files import naming

_VALID = datetime.timedelta(days=730)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def make(directory: Path, sites: list[str], hosts: list[str]) -> None:
    """Write `ca.pem server.pem server.key`, and `sites/NAME sites/NAME.pub` for each site; nothing is overwritten.

    The server needs the first three and the `.pub` files; a site needs `ca.pem` and its own `NAME`.
    `hosts` are the names and addresses by which sites reach the server.
    """
    if not hosts:
        raise SettingError("no hosts: give the names or addresses by which sites reach the server")
    if len(set(sites)) != len(sites):
        raise SettingError("two sites have the same name")
    for site in sites:
        if not _NAME.fullmatch(site) or site.endswith(".pub"):
            raise SettingError(f"site {site!r}: a name has letters, digits, '.', '-' and '_', and does not end in .pub")
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    certificate = _certificate(server.public_key(), hosts, authority)
    public = {"ca.pem": _authority(authority).public_bytes(Encoding.PEM), "server.pem": certificate}
    private = {"server.key": server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())}
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())  # the curve that Flower's own documentation uses
        private[f"sites/{site}"] = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public[f"sites/{site}.pub"] = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"

    there = [name for name in [*public, *private] if (directory / name).exists()]
    if there:
        raise SettingError(f"{directory} already has {', '.join(sorted(there))}; keys are not overwritten")
    (directory / "sites").mkdir(parents=True, exist_ok=True)
    for name, data in public.items():
        _write(directory / name, data, 0o644)
    for name, data in private.items():
        _write(directory / name, data, 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    """A new file that at no moment had other rights than these."""
    with naming(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def _builder(name: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("fedstill CA"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the clocks of two machines differ
        .not_valid_after(now + _VALID)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= dict.fromkeys(("digital_signature", "encipher_only", "decipher_only"), False)
    return (
        _builder("fedstill CA", key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _certificate(key: ec.EllipticCurvePublicKey, hosts: list[str], authority: ec.EllipticCurvePrivateKey) -> bytes:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _builder("fedstill server", key)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority, hashes.SHA384())
        .public_bytes(Encoding.PEM)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise SettingError(f"host {host!r} is no name and no address: {error}") from error
