"""A site's side of secure aggregation: its update leaves it under masks alone.

What a server passes on from other sites is not trusted: `privacy/masks.py` refuses keys, shares and lists with which a
server could learn one site's update.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedstill.core import tree
from fedstill.core.files import home_path
from fedstill.core.reports import Code, Refusal
from fedstill.core.tree import Message, Tree
from fedstill.deployment.policy import Policy
from fedstill.deployment.protocol import MASK_CONFIRM, MASK_KEYS, MASK_REVEAL, MASK_SHARES, MASKED, RunInfo, run_number
from fedstill.methods.base import Part, fault
from fedstill.methods.summed import to_integers
from fedstill.privacy import fixed_point
from fedstill.privacy.masks import MaskError, Participant
from fedstill.privacy.signatures import Signer, check_signed, read_known

_MOST = 1000  # other sites in one request
_MOST_IN_SUM = fixed_point.MOST
_OWN = ("client", "checkpoint")  # of the run info: what differs from site to site, or while a round goes on
_LONGEST = 4096  # characters of a key, or of shares


def is_masking(body: Any) -> bool:
    """Whether a request is one of those around the training of a masked round."""
    return isinstance(body, dict) and body.get("kind") in (MASK_KEYS, MASK_SHARES, MASK_CONFIRM, MASK_REVEAL)


class SiteMasks:
    """The masks of the round that is under way; a new round, or a new attempt at it, has its own."""

    def __init__(self, policy: Policy, signer: Signer | None = None) -> None:
        self._policy, self._signer = policy, signer
        self._known = read_known(home_path(policy.known_sites)) if policy.known_sites else None
        self._current: tuple[str, Participant] | None = None  # with the run that it belongs to
        self._least = policy.min_sites  # updates in a sum
        self._about = ""  # what the update was made from

    def handle(self, body: Mapping[str, Any], run: RunInfo, fewest: int = 1) -> Tree:
        """The answer to a request for public keys, for shares, or for what takes the masks off a sum.

        `fewest`: how many updates the run's method wants in a sum, where it hides them by noise.
        """
        self._want(fewest)
        with _refusing():
            if body["kind"] == MASK_KEYS:
                return self._begin(_text(body["session"]), run)
            participant = self._participant(body["session"], run)
            if body["kind"] == MASK_SHARES:
                pairs = {client: _pair(keys) for client, keys in _by_client(body["keys"]).items()}
                if self._known is not None:
                    signed = {client: _pair(given) for client, given in _by_client(body["signatures"]).items()}
                    check_signed(self._known, run_number(run), participant.session, pairs, signed)
                shares, digest = participant.share(pairs, clients=_clients(body["clients"]), least=self._least)
                return {"shares": _named(shares), "digest": digest}
            if body["kind"] == MASK_CONFIRM:
                answered, gone = _clients(body["answered"]), _clients(body["gone"])
                proofs = participant.confirm(answered, gone, least=self._least)
                return {"proofs": _named(proofs), "about": self._about}
            received = {client: _text(proof) for client, proof in _by_client(body["proofs"]).items()}
            return {"shares": _named(participant.reveal(received))}

    def _want(self, fewest: int) -> None:
        """Of one sum, what was wanted once stays wanted: a server sends the run's settings with every request."""
        self._least = max(self._least, fewest)

    def _begin(self, session: str, run: RunInfo) -> Tree:
        participant = Participant(run["client"], session)
        self._current, self._least = (run["number"], participant), self._policy.min_sites
        keys = participant.public_keys()
        signed = self._signer.sign(run_number(run), session, run["client"], keys) if self._signer else ()
        return {"keys": list(keys), "signature": list(signed)}

    def masked(
        self, masking: Any, message: Message, declared: Mapping[str, Part], run: RunInfo, about: str, fewest: int = 1
    ) -> Message:
        """What a client is to send in its message's place; `about`: what it was made from."""
        self._want(fewest)
        self._about = about
        if problem := fault(message, dict(declared)):
            raise Refusal(Code.ANSWER_UNDECLARED, f"the update cannot be in a sum: {problem}")
        with _refusing():
            participant = self._participant(masking["session"], run)
            received = {client: _text(text) for client, text in _by_client(masking["shares"]).items()}
            return {MASKED: participant.mask(received, to_integers(message, declared), least=self._least, about=about)}

    def check(self, masking: Any, run: RunInfo) -> None:
        """Refuse, before any work, to train for a server that has not begun with the keys."""
        with _refusing():
            self._participant(masking["session"], run)

    def _participant(self, session: Any, run: RunInfo) -> Participant:
        if self._current is None or self._current[0] != run["number"] or self._current[1].session != session:
            raise MaskError("no such sum is under way here; the site may have been started again since")
        return self._current[1]


def digest_of(run: RunInfo, round_: int, region: int, down: Message) -> str:
    """What all sites of a sum must have been sent alike: the run's settings, the round, and the model."""
    alike = {name: value for name, value in run.items() if name not in _OWN}
    found = hashlib.sha256(json.dumps([alike, round_, region], sort_keys=True).encode())
    for name, tensor in sorted(down.items()):
        kind = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        found.update(hashlib.sha256(kind.encode()).digest() + hashlib.sha256(tree.encode({"": tensor})).digest())
    return found.hexdigest()


@contextmanager
def _refusing() -> Iterator[None]:
    """Report whatever cannot be part of a sum by one code; the reason is for the site's own log."""
    try:
        yield
    except (MaskError, KeyError, TypeError, ValueError) as error:
        raise Refusal(Code.MASKING_REFUSED, f"secure aggregation: {error}") from error


def _named(found: Mapping[int, str]) -> dict[str, str]:
    return {str(client): text for client, text in found.items()}


def _by_client(given: Any) -> dict[int, Any]:
    if not isinstance(given, dict) or len(given) > _MOST:
        raise MaskError(f"what the server passes on is not of at most {_MOST} sites")
    return {int(client): value for client, value in given.items()}


def _clients(given: Any) -> Sequence[int]:
    if not isinstance(given, list) or len(given) > _MOST_IN_SUM or not all(type(client) is int for client in given):
        raise MaskError("no list of clients")
    return given


def _pair(given: Any) -> tuple[str, str]:
    first, second = given
    return _text(first), _text(second)


def _text(given: Any) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST:
        raise MaskError(f"no text of at most {_LONGEST} characters")
    return given
