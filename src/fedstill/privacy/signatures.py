"""Signatures by which sites know each other's keys of a sum, whatever the server between them says.

A site signs with the key by which its server knows it. A site that has the others' public keys (`known_sites` of its
policy) takes no key for a sum from anybody else, so that its server cannot invent sites, or take a site's place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core.errors import SettingError
from fedstill.privacy.masks import MaskError, PublicKeys

Signature = tuple[str, str]  # who signed, as a public key in OpenSSH's format, and the signature


@dataclass(frozen=True)
class Signer:
    """A site's own private key, in OpenSSH's format."""

    path: Path

    def sign(self, run: str, session: str, client: int, keys: PublicKeys) -> Signature:
        """That these are the keys of this client in this sum."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            key = load_ssh_private_key(self.path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise SettingError(f"the key {self.path} cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SettingError(f"{self.path} is not an elliptic-curve key, as made by `ssh-keygen -t ecdsa -b 256`")
        return _text(key.public_key()), key.sign(_signed(run, session, client, keys), ec.ECDSA(hashes.SHA384())).hex()


def read_known(folder: Path) -> list[str]:
    """The public keys of the sites in a folder, `NAME.pub` of each."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    found = []
    for path in sorted(folder.glob("*.pub")):
        try:
            found.append(_text(load_ssh_public_key(path.read_bytes())))
        except (OSError, ValueError) as error:
            raise SettingError(f"known_sites: the public key {path} cannot be read: {error}") from error
    if len(set(found)) < 2:
        raise SettingError(
            f"known_sites: {folder} has public keys (NAME.pub) of {len(set(found))} sites; give 2 or more"
        )
    return found


def check_signed(
    known: Sequence[str], run: str, session: str, keys: Mapping[int, PublicKeys], signed: Mapping[int, Signature]
) -> None:
    """Refuse keys of a sum that are not each signed by a known site, and each by another."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    seen = set()
    for client, own in keys.items():
        signer, signature = signed.get(client, ("", ""))
        if signer not in known or signer in seen:
            raise MaskError(f"the keys of client {client} are not signed by a known site, or by one for two clients")
        seen.add(signer)
        key = load_ssh_public_key(signer.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise MaskError(f"client {client} signs with a key that is not of an elliptic curve")
        try:
            key.verify(bytes.fromhex(signature), _signed(run, session, client, own), ec.ECDSA(hashes.SHA384()))
        except InvalidSignature as error:
            raise MaskError(f"the signature on the keys of client {client} is not right") from error


def _signed(run: str, session: str, client: int, keys: PublicKeys) -> bytes:
    return json.dumps(["fedstill keys of a sum", run, session, client, *keys]).encode()


def _text(public: Any) -> str:
    """A public key without a comment."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    text: bytes = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return text.decode()
