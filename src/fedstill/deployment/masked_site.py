"""A site's side of secure aggregation: its update leaves it under masks alone.

What a server passes on from other sites is not trusted: `privacy/masks.py` refuses keys, shares and lists with which a
server could learn one site's update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedstill.core.reports import Code, Refusal
from fedstill.core.tree import Message, Tree
from fedstill.deployment.policy import Policy
from fedstill.deployment.protocol import MASK_KEYS, MASK_REVEAL, MASK_SHARES, MASKED, RunInfo
from fedstill.methods.base import Part, fault
from fedstill.methods.summed import to_integers
from fedstill.privacy.masks import MaskError, Participant

_MOST = 1000  # other sites in one request
_LONGEST = 4096  # characters of a key, or of shares


def is_masking(body: Any) -> bool:
    """Whether a request is one of those around the training of a masked round."""
    return isinstance(body, dict) and body.get("kind") in (MASK_KEYS, MASK_SHARES, MASK_REVEAL)


class SiteMasks:
    """The masks of the round that is under way; a new round, or a new attempt at it, has its own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._current: tuple[str, Participant] | None = None  # with the run that it belongs to

    def handle(self, body: Mapping[str, Any], run: RunInfo) -> Tree:
        """The answer to a request for public keys, for shares, or for what takes the masks off a sum."""
        with _refusing():
            if body["kind"] == MASK_KEYS:
                participant = Participant(run["client"], _text(body["session"]))
                self._current = (run["number"], participant)
                return {"keys": list(participant.public_keys())}
            participant = self._participant(body["session"], run)
            if body["kind"] == MASK_SHARES:
                pairs = {client: _pair(keys) for client, keys in _by_client(body["keys"]).items()}
                shares, digest = participant.share(pairs, least=self._policy.min_sites)
                return {"shares": {str(client): share for client, share in shares.items()}, "digest": digest}
            revealed = participant.reveal(
                _clients(body["answered"]), _clients(body["gone"]), least=self._policy.min_sites
            )
            return {"shares": {str(client): share for client, share in revealed.items()}}

    def masked(self, masking: Any, message: Message, declared: Mapping[str, Part], run: RunInfo) -> Message:
        """What a client is to send in its message's place."""
        if problem := fault(message, dict(declared)):
            raise Refusal(Code.ANSWER_UNDECLARED, f"the update cannot be in a sum: {problem}")
        with _refusing():
            participant = self._participant(masking["session"], run)
            received = {client: _text(text) for client, text in _by_client(masking["shares"]).items()}
            return {MASKED: participant.mask(received, to_integers(message, declared), least=self._policy.min_sites)}

    def check(self, masking: Any, run: RunInfo) -> None:
        """Refuse, before any work, to train for a server that has not begun with the keys."""
        with _refusing():
            self._participant(masking["session"], run)

    def _participant(self, session: Any, run: RunInfo) -> Participant:
        if self._current is None or self._current[0] != run["number"] or self._current[1].session != session:
            raise MaskError("no such sum is under way here; the site may have been started again since")
        return self._current[1]


@contextmanager
def _refusing() -> Iterator[None]:
    """Report whatever cannot be part of a sum by one code; the reason is for the site's own log."""
    try:
        yield
    except (MaskError, KeyError, TypeError, ValueError) as error:
        raise Refusal(Code.MASKING_REFUSED, f"secure aggregation: {error}") from error


def _by_client(given: Any) -> dict[int, Any]:
    if not isinstance(given, dict) or len(given) > _MOST:
        raise MaskError(f"what the server passes on is not of at most {_MOST} sites")
    return {int(client): value for client, value in given.items()}


def _clients(given: Any) -> Sequence[int]:
    if not isinstance(given, list) or len(given) > _MOST or not all(type(client) is int for client in given):
        raise MaskError("no list of clients")
    return given


def _pair(given: Any) -> tuple[str, str]:
    first, second = given
    return _text(first), _text(second)


def _text(given: Any) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST:
        raise MaskError(f"no text of at most {_LONGEST} characters")
    return given
