"""Secure aggregation: a server learns the sum of vectors, and of no vector anything else.

SecAgg (Bonawitz et al. 2017) and SecAgg+ (Bell et al. 2020), of which this is one attempt at one sum. In five steps:

1. Everyone makes two key pairs. 2. With the public keys of its neighbours, everyone makes a secret with each of them,
and divides its own seed and its private key among them, so that more than half can put either together. 3. Everyone
adds masks to its vector: one from its seed, and one from each secret, which one of the two adds and the other
subtracts. 4. Everyone confirms to its neighbours, under a secret that the server does not know, which list it was given
of who answered and who did not. 5. If enough of them were given the same one, the neighbours of whoever answered give
their shares of its seed, and those of whoever did not, of its private key: so the server takes off the masks that are
left in the sum.

Shares can be read only by those who were given the same clients as whoever made them, and everyone knows from these
who its neighbours are. A server that gave each another circle could else have two circles, each of one mind, reveal the
two secrets of a client in both.

The masks of two clients also depend on what their vectors were made from, such as the model: if that differs, they do
not cancel. A server that gives others a model from which they learn nothing would else find one client's update in the
sum (Pasquini et al. 2022).

Keys, encryption and shares are Flower's. Masks are not: its generator starts from 32 bits, which a server could try
out one by one; here they are the key stream of AES-256 in counter mode.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import FedstillError, SettingError

Words = NDArray[np.uint64]
PublicKeys = tuple[str, str]  # for the shares, and for the masks

MOST_NEIGHBOURS = 100  # enough for thousands of clients of whom a third collude and a third drop out (Bell et al.)
_SCALAR = 48  # bytes of a private key


class MaskError(FedstillError):
    """What came from the others cannot belong to a sum."""


def neighbours(clients: Sequence[int], most: int = MOST_NEIGHBOURS) -> dict[int, list[int]]:
    """Who makes secrets with whom: all with all, or on a ring each with those next to it. Everyone is its own too.

    >>> neighbours([3, 5, 8])
    {3: [3, 5, 8], 5: [3, 5, 8], 8: [3, 5, 8]}
    >>> neighbours([0, 1, 2, 3, 4, 5], most=2)[0]
    [0, 1, 5]
    """
    count = len(clients)
    if count <= most + 1:
        return {client: sorted(clients) for client in clients}
    steps = range(-(most // 2), most // 2 + 1)
    return {client: sorted(clients[(place + step) % count] for step in steps) for place, client in enumerate(clients)}


def threshold(holders: int) -> int:
    """How many of them put a secret together: a majority, so that no two groups give away both secrets of one."""
    return holders // 2 + 1


def confirmations(clients: int) -> int:
    """How many clients, oneself included, must have been given the same list before anything is revealed.

    Two lists cannot both be confirmed by so many unless a third of the clients confirm both, and an honest one confirms
    one: so nobody is named as answering to some and as gone to others, while less than a third help the server.

    >>> [confirmations(n) for n in (2, 3, 4, 5, 10, 100)]
    [2, 2, 3, 4, 7, 67]
    """
    helpers = (clients - 1) // 3  # the largest number below a third
    return (clients + helpers) // 2 + 1


@dataclass
class Participant:
    """One client's side of one sum. The steps come in their order, each once."""

    client: int
    session: str  # the server's name of the sum, which every mask depends on
    _keys: dict[int, PublicKeys] = field(default_factory=dict)
    _circle: bytes = b""  # of all clients of the sum, and of the keys that all of them know: its digest
    _shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # of others' seeds and private keys
    _seed: bytes = field(default_factory=lambda: os.urandom(32))
    _masked: bool = False
    _list: tuple[list[int], list[int]] | None = None  # who answered and who did not, as the server says

    def __post_init__(self) -> None:
        lib = _library()
        self._private = [lib.generate_key_pairs()[0] for _ in range(2)]
        self._own = (_public(self._private[0]), _public(self._private[1]))

    def public_keys(self) -> PublicKeys:
        """Step 1: for the server, to pass on."""
        return self._own

    def share(
        self,
        keys: Mapping[int, PublicKeys],
        *,
        clients: Sequence[int] | None = None,
        least: int = 2,
        most: int = MOST_NEIGHBOURS,
    ) -> tuple[dict[int, str], str]:
        """Step 2: for each neighbour its shares, encrypted, and a digest of the seed; not among fewer than `least`.

        `clients`: all of the sum, if they are not those of the keys; `most`: neighbours that each of them has.
        """
        if self._keys:
            raise MaskError("the keys of the others came twice")
        if keys.get(self.client) != self._own or len({key for pair in keys.values() for key in pair}) != 2 * len(keys):
            raise MaskError("the keys of the others are not one for each, or another one stands for this client's")
        everyone = sorted(set(keys if clients is None else clients))
        if self.client not in everyone or neighbours(everyone, most)[self.client] != sorted(keys):
            raise MaskError("the keys are not of those who are next to this client among the clients of the sum")
        if len(keys) < max(2, least):
            raise MaskError(f"a sum of {len(keys)} clients' updates, and at least {max(2, least)} have to be in it")
        known = sorted(keys.items()) if len(keys) == len(everyone) else []
        self._circle = hashlib.sha256(json.dumps([everyone, known]).encode()).digest()
        lib, self._keys = _library(), dict(keys)
        holders, needed = sorted(keys), threshold(len(keys))
        seeds = lib.create_shares(self._seed, needed, len(holders))
        privates = lib.create_shares(_scalar(self._private[1]), needed, len(holders))
        sent = {}
        for holder, of_seed, of_private in zip(holders, seeds, privates, strict=True):
            if holder == self.client:
                self._shares[holder] = (of_seed, of_private)
                continue
            plain = lib.share_keys_plaintext_concat(self.client, holder, of_seed, of_private)
            sent[holder] = lib.encrypt(self._box(holder), plain).decode()
        return sent, _digest(self._seed)

    def mask(self, received: Mapping[int, str], vector: Tensor, *, least: int = 2, about: str = "") -> Tensor:
        """Step 3: the vector of integers under masks; `received` are the encrypted shares of those who are there.

        `about`: what the vector was made from; only vectors made from the same add up.
        """
        if not self._keys or self._masked or not set(received) <= set(self._keys) - {self.client}:
            raise MaskError("the shares of the others came at the wrong time, or are of somebody else")
        if len(received) + 1 < max(least, threshold(len(self._keys))):
            raise MaskError(f"only {len(received) + 1} of {len(self._keys)} clients are there for the sum")
        lib, self._masked = _library(), True
        for sender, text in received.items():
            try:
                plain = lib.decrypt(self._box(sender), text.encode())
                source, target, of_seed, of_private = lib.share_keys_plaintext_separate(plain)
            except Exception as error:
                raise MaskError(f"the shares of client {sender} cannot be read") from error
            if (source, target) != (sender, self.client):
                raise MaskError(f"the shares of client {sender} are meant for somebody else")
            self._shares[sender] = (of_seed, of_private)
        words = vector.cpu().numpy().view(np.uint64).copy()
        words += _stream(self._seed, self.session, len(words))
        for other in received:
            _add(words, self._secret(1, other), f"{self.session} {about}", plus=self.client < other)
        return torch.from_numpy(words.view(np.int64))

    def confirm(self, answered: Sequence[int], gone: Sequence[int], *, least: int = 2) -> dict[int, str]:
        """Step 4: for each neighbour who answered, the proof that this list is the one that this client was given.

        `answered` and `gone` are of all clients of the sum. There is one list; not one by which both secrets of a
        client are revealed, or by which the sum has fewer than `least` vectors in it.
        """
        everyone = set(answered) | set(gone)
        there, away = set(answered) & set(self._keys), set(gone) & set(self._keys)
        if not self._masked or self._list is not None or set(answered) & set(gone):
            raise MaskError("a list of who answered at the wrong time, or a second one, or with a client twice")
        if there | away != set(self._shares) or len(everyone) != len(answered) + len(gone):
            raise MaskError("the list of who answered is not of those whose shares came")
        if self.client not in there or len(there) < max(least, threshold(len(self._keys))):
            raise MaskError(f"the sum would be of {len(there)} clients' updates: too few to hide one")
        self._list = sorted(answered), sorted(gone)
        return {other: self._proof(self.client, other) for other in sorted(there - {self.client})}

    def reveal(self, proofs: Mapping[int, str]) -> dict[int, str]:
        """Step 5: shares of the seeds of those who answered and of the private keys of those who did not, once.

        `proofs`: what neighbours sent to this client in step 4.
        """
        if self._list is None or not self._shares:
            raise MaskError("asked for shares before the list of who answered was confirmed, or twice")
        answered, away = set(self._list[0]), set(self._list[1])
        same = 1  # this client itself
        for other, proof in proofs.items():
            if other == self.client or other not in answered or other not in self._shares:
                raise MaskError(f"client {other} has nothing to confirm")
            same += hmac.compare_digest(proof, self._proof(other, self.client))
        if same < (needed := confirmations(len(self._keys))):
            raise MaskError(f"{same} of {len(self._keys)} clients were given this list of who answered, {needed} must")
        shares, self._shares = self._shares, {}
        return {client: shares[client][client in away].hex() for client in sorted(shares)}

    def _proof(self, sender: int, receiver: int) -> str:
        """What only these two can make: that the sender was given this client's list."""
        text = json.dumps(["fedstill answered", self.session, sender, receiver, self._list])
        secret = self._secret(0, sender if sender != self.client else receiver)
        return hmac.new(hashlib.sha256(b"fedstill proof " + secret).digest(), text.encode(), "sha256").hexdigest()

    def _box(self, other: int) -> bytes:
        """The key of what these two send each other, if they were given the same clients."""
        found = hashlib.sha256(b"fedstill shares " + self._circle + self._secret(0, other))
        return base64.urlsafe_b64encode(found.digest())

    def _secret(self, which: int, other: int) -> bytes:
        """What this client and another know, and nobody else."""
        return _secret(self._private[which], self._keys[other][which])


def unmask(
    session: str,
    vectors: Iterable[Tensor],
    answered: Sequence[int],
    gone: Sequence[int],
    *,
    keys: Mapping[int, PublicKeys],
    around: Mapping[int, Sequence[int]],
    digests: Mapping[int, str],
    revealed: Mapping[int, Mapping[int, str]],
    about: str = "",
) -> Tensor:
    """The sum of the masked vectors of those who answered, without its masks.

    `around`: who holds shares of whom; `revealed`: what each of them gave of whom.
    """
    total: Words | None = None
    for vector in vectors:
        words = vector.numpy().view(np.uint64)
        total = words.copy() if total is None else total + words
    assert total is not None
    for client in answered:
        seed = _combined(client, revealed, len(around[client]))
        if _digest(seed) != digests[client]:
            raise MaskError(f"the shares of client {client}'s seed do not fit together")
        total -= _stream(seed, session, len(total))
    for client in gone:
        private = _private_key(_combined(client, revealed, len(around[client])))
        if _public(private) != keys[client][1]:
            raise MaskError(f"the shares of client {client}'s key do not fit together")
        for other in set(around[client]) & set(answered):
            _add(total, _secret(private, keys[other][1]), f"{session} {about}", plus=client < other)
    return torch.from_numpy(total.view(np.int64))


def _combined(client: int, revealed: Mapping[int, Mapping[int, str]], holders: int) -> bytes:
    found = [shares[client] for _, shares in sorted(revealed.items()) if client in shares]
    if len(found) < (needed := threshold(holders)):
        raise MaskError(f"{len(found)} of the {holders} who hold shares of client {client} answered, {needed} must")
    try:
        return bytes(_library().combine_shares([bytes.fromhex(share) for share in found[:needed]]))
    except (ValueError, IndexError) as error:
        raise MaskError(f"the shares of client {client} do not fit together") from error


def _add(words: Words, secret: bytes, session: str, *, plus: bool) -> None:
    stream = _stream(secret, session, len(words))
    if plus:
        words += stream
    else:
        words -= stream


def _stream(secret: bytes, session: str, count: int) -> Words:
    """So many numbers that look random to whoever does not know the secret."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = hashlib.sha256(b"fedstill mask " + session.encode() + b" " + secret).digest()
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), np.uint64)


def _digest(seed: bytes) -> str:
    return hashlib.sha256(b"fedstill seed " + seed).hexdigest()


def _secret(private: Any, public: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), bytes.fromhex(public))
    except ValueError as error:
        raise MaskError("a public key is none") from error
    return bytes(_library().generate_shared_key(private, key))


def _public(private: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    encoded: bytes = private.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return encoded.hex()


def _scalar(private: Any) -> bytes:
    value: int = private.private_numbers().private_value
    return value.to_bytes(_SCALAR, "big")


def _private_key(scalar: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        return ec.derive_private_key(int.from_bytes(scalar, "big"), ec.SECP384R1())
    except ValueError as error:
        raise MaskError("the shares of a key do not fit together") from error


def _library() -> Any:
    """Flower's primitives of secure aggregation."""
    try:
        from flwr.common.secure_aggregation import secaggplus_utils
        from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
        from flwr.supercore.primitives import asymmetric
    except ImportError as error:
        raise SettingError("secure aggregation of sites needs Flower: pip install 'fedstill[flower]'") from error
    modules = (secaggplus_utils, shamir, symmetric_encryption, asymmetric)
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})
