"""Keys: a certificate authority, the server's certificate, and a key pair for each site; who is let in, and who not.

The authority signs once and its private key is not kept: nobody can make a second certificate that sites believe.
A directory of keys has `sites/NAME.pub` for each site that is let in, and `revoked/NAME.pub` with the keys, a line
each, of which none is let in again.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import unicodedata
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstill.core.errors import SettingError, unknown
from fedstill.core.files import naming, write_atomic

_CURVE = ec.SECP256R1()  # a site signs every request: 0.02 ms, where the P-384 of Flower's documentation takes 0.8
_VALID = datetime.timedelta(days=730)
_NAME = re.compile(r"[\w-][\w.-]*")


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
        _check_name(site)
    authority, server = ec.generate_private_key(_CURVE), ec.generate_private_key(_CURVE)
    certificate = _certificate(server.public_key(), hosts, authority)
    public = {"ca.pem": _authority(authority).public_bytes(Encoding.PEM), "server.pem": certificate}
    private = {"server.key": server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())}
    for site in sites:
        private[f"sites/{site}"], public[f"sites/{site}.pub"] = _pair()

    there = [name for name in [*public, *private] if (directory / name).exists()]
    if there:
        raise SettingError(f"{directory} already has {', '.join(sorted(there))}; keys are not overwritten")
    (directory / "sites").mkdir(parents=True, exist_ok=True)
    for name, data in public.items():
        _write(directory / name, data, 0o644)
    for name, data in private.items():
        _write(directory / name, data, 0o600)


def add(directory: Path, site: str, public: Path | None = None) -> None:
    """Let a site in: with its own `public` key, or a new key pair."""
    _check_name(site)
    if not (directory / "sites").is_dir():
        raise SettingError(f"{directory} has no folder 'sites'; 'fedstill keys {directory} --site {site}' makes it")
    name = directory / "sites" / f"{site}.pub"
    if name.exists():
        raise SettingError(f"{name} is there already; 'fedstill keys revoke {directory} {site}' takes it away")
    if public is None:
        private, key = _pair()
        _write(directory / "sites" / site, private, 0o600)
    else:
        key = _only_key(public)
        for path in sorted((directory / "revoked").glob("*.pub")):
            if _without_comment(key) in map(_without_comment, path.read_bytes().splitlines()):
                raise SettingError(f"the key in {public} was revoked ({path}); the site needs a new one")
    _write(name, key, 0o644)


def revoke(directory: Path, site: str) -> None:
    """Let a site in no more; its key is noted in `revoked`."""
    _check_name(site)
    name, gone = directory / "sites" / f"{site}.pub", directory / "revoked"
    if not name.is_file():
        raise unknown("site", site, public_keys(directory))
    gone.mkdir(exist_ok=True)
    earlier = (gone / name.name).read_bytes() if (gone / name.name).exists() else b""
    write_atomic(gone / name.name, earlier + name.read_bytes().rstrip() + b"\n")
    name.unlink()
    private = directory / "sites" / site
    if private.exists():  # of a trial, where the server made it
        private.replace(gone / site)


def public_keys(directory: Path) -> dict[str, Path]:
    """The sites that are let in, by name, and the files of their keys."""
    return {path.stem: path for path in sorted((directory / "sites").glob("*.pub"))}


def revoked(directory: Path) -> set[str]:
    """The sites whose key was revoked, and that have no other."""
    return {path.stem for path in (directory / "revoked").glob("*.pub")} - public_keys(directory).keys()


def check_dates(path: Path) -> datetime.datetime:
    """When a certificate expires; SettingError if it has expired, or is not valid yet."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingError(f"the certificate {path} cannot be read: {error}") from error
    now = datetime.datetime.now(datetime.UTC)
    begins = max(each.not_valid_before_utc for each in found)
    ends = min(each.not_valid_after_utc for each in found)
    if now >= ends:
        raise SettingError(f"the certificate {path} expired on {ends:%Y-%m-%d %H:%M} UTC; make new ones")
    if now < begins:
        hint = "this machine's clock may be wrong"
        raise SettingError(f"the certificate {path} is not valid before {begins:%Y-%m-%d %H:%M} UTC; {hint}")
    return ends


def _check_name(site: str) -> None:
    if not _NAME.fullmatch(site) or site.endswith(".pub") or not unicodedata.is_normalized("NFC", site):
        raise SettingError(f"site {site!r}: a name has letters, digits, '.', '-' and '_', and does not end in .pub")


def _pair() -> tuple[bytes, bytes]:
    """A private and a public key."""
    key = ec.generate_private_key(_CURVE)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def _only_key(path: Path) -> bytes:
    """The public key that a file holds, as one line."""
    try:
        data = path.read_bytes()
        key = load_ssh_public_key(data)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise SettingError(f"the public key {path} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SettingError(f"{path} is not an elliptic-curve key, as made by `ssh-keygen -t ecdsa -b 256`")
    return data.strip().splitlines()[0] + b"\n"


def _without_comment(line: bytes) -> list[bytes]:
    return line.split()[:2]


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
        .sign(key, hashes.SHA256())
    )


def _certificate(key: ec.EllipticCurvePublicKey, hosts: list[str], authority: ec.EllipticCurvePrivateKey) -> bytes:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        _builder("fedstill server", key)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority, hashes.SHA256())
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
