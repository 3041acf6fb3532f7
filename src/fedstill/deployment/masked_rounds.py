"""A server's side of secure aggregation: it asks sites for keys, shares, masked updates and what unmasks their sum.

A site that is gone after any of the steps is left out of the sum; with too few left the attempt fails as a whole.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedstill.core.tree import Tree
from fedstill.deployment.protocol import MASK_CONFIRM, MASK_KEYS, MASK_REVEAL, MASK_SHARES, MASKED, failure_reason
from fedstill.engine.worker import Train, request_fields
from fedstill.methods.base import Part
from fedstill.methods.summed import masked_bytes, mean_message
from fedstill.privacy import fixed_point
from fedstill.privacy.masks import MaskError, PublicKeys, confirmations, neighbours, threshold, unmask

log = logging.getLogger(__name__)

Exchange = Callable[[Mapping[int, Tree], str, int, bool], Iterator[tuple[int, Any]]]
"""Sends each client's request and gives answers as they come: requests, name, how many suffice, whether it trains."""
_LONGEST = 4096  # characters of a key, or of shares


class MaskedRound:
    """One attempt at a round."""

    def __init__(self, exchange: Exchange, declared: Mapping[str, Part], least: int) -> None:
        """`least`: how many updates the sum must have in it."""
        self._exchange, self._declared = exchange, declared
        self._least = max(2, least)
        self._session = secrets.token_hex(16)
        self._failures: dict[int, str] = {}
        self._about = ""  # what the updates were made from, as the sites say
        self._signatures: dict[int, list[str]] = {}  # on the keys, for sites that know each other

    def run(self, requests: Sequence[Train]) -> list[Tree]:
        """An answer for each request: with the mean of all updates in its update's place, or why it does not count."""
        fixed_point.check_count(len(requests))
        clients = [request.client for request in requests]
        try:
            return self._run(requests, clients)
        except MaskError as error:
            log.warning("no sum of masked updates: %s", error)
            return [{"failure": self._failures.get(client, str(error))} for client in clients]

    def _run(self, requests: Sequence[Train], clients: Sequence[int]) -> list[Tree]:
        keys = self._public_keys(clients)
        around = neighbours(sorted(keys))
        shares, digests = self._shares(keys, around)
        answers = self._masked_updates(requests, shares, around)
        gone = sorted(set(shares) - set(answers))
        total = self._sum(answers, gone, keys, around, digests)
        if not fixed_point.can_be_sum(total, len(answers)):
            raise MaskError(
                "what is left without the masks cannot be a sum of updates: a site did not follow the rules"
            )
        mean = mean_message(total, len(answers), self._declared)
        return [
            {**answers[client], "samples": 1, "message": dict(mean)}
            if client in answers
            else {"failure": self._failures.get(client, "it was gone before its update was masked")}
            for client in clients
        ]

    def _public_keys(self, clients: Sequence[int]) -> dict[int, PublicKeys]:
        """Step 1."""
        body = {"kind": MASK_KEYS, "session": self._session}
        found: dict[int, PublicKeys] = {}
        for client, answer in self._asked(dict.fromkeys(clients, body), MASK_KEYS, threshold(len(clients))):
            given = answer.get("keys")
            if isinstance(given, list) and len(given) == 2 and all(map(_is_text, given)):
                found[client] = (given[0], given[1])
                signature = answer.get("signature")
                if isinstance(signature, list) and len(signature) == 2 and all(map(_is_text, signature)):
                    self._signatures[client] = signature
            else:
                self._fail(client, "it sent no public keys")
        self._check_enough(found, "public keys")
        return found

    def _shares(
        self, keys: Mapping[int, PublicKeys], around: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, dict[int, str]], dict[int, str]]:
        """Step 2: what each sent to each of the others, which the server cannot read, and the digest of its seed."""
        bodies = {
            client: {
                "kind": MASK_SHARES,
                "session": self._session,
                "clients": sorted(keys),
                "keys": {str(k): list(keys[k]) for k in around[client]},
                "signatures": {str(k): self._signatures[k] for k in around[client] if k in self._signatures},
            }
            for client in keys
        }
        found: dict[int, dict[int, str]] = {}
        digests: dict[int, str] = {}
        for client, answer in self._asked(bodies, MASK_SHARES, threshold(len(keys))):
            given, digest = _by_client(answer.get("shares")), answer.get("digest")
            if given is None or set(given) != set(around[client]) - {client} or not _is_text(digest):
                self._fail(client, "it sent no shares for each of the others")
            else:
                found[client], digests[client] = given, str(digest)
        self._check_enough(found, "shares")
        return found, digests

    def _masked_updates(
        self, requests: Sequence[Train], shares: Mapping[int, Mapping[int, str]], around: Mapping[int, Sequence[int]]
    ) -> dict[int, dict[str, Any]]:
        """Step 3: the clients train."""
        bodies = {}
        for request in requests:
            if request.client in shares:
                senders = [k for k in around[request.client] if k in shares and k != request.client]
                received = {str(sender): shares[sender][request.client] for sender in senders}
                bodies[request.client] = request_fields(request) | {
                    "masking": {"session": self._session, "shares": received}
                }
        size = masked_bytes(self._declared) // torch.int64.itemsize
        found: dict[int, dict[str, Any]] = {}
        least = max(self._least, threshold(len(shares)))
        for client, answer in self._asked(bodies, f"Train {self._session}", least, trains=True):
            message = answer.get("message")
            masked = message.get(MASKED) if isinstance(message, dict) and len(message) == 1 else None
            if not isinstance(masked, Tensor) or masked.dtype != torch.int64 or masked.shape != (size,):
                self._fail(client, "its update is not masked as it should be")
            else:
                found[client] = answer
        self._check_enough(found, "masked updates")
        return found

    def _sum(
        self,
        answers: Mapping[int, Mapping[str, Any]],
        gone: Sequence[int],
        keys: Mapping[int, PublicKeys],
        around: Mapping[int, Sequence[int]],
        digests: Mapping[int, str],
    ) -> Tensor:
        """Steps 4 and 5."""
        answered = sorted(answers)
        proofs = self._proofs(answered, gone, around, confirmations(len(keys)))
        bodies = {
            client: {
                "kind": MASK_REVEAL,
                "session": self._session,
                "proofs": {str(k): proofs[k][client] for k in around[client] if client in proofs.get(k, {})},
            }
            for client in proofs
        }
        revealed: dict[int, dict[int, str]] = {}
        for client, answer in self._asked(bodies, MASK_REVEAL, threshold(len(keys)), drops=False):
            if (given := _by_client(answer.get("shares"))) is not None:
                revealed[client] = given
        return unmask(
            self._session,
            (answers[client]["message"][MASKED] for client in answered),
            answered,
            gone,
            keys=keys,
            around=around,
            digests=digests,
            revealed=revealed,
            about=self._about,
        )

    def _proofs(
        self, answered: Sequence[int], gone: Sequence[int], around: Mapping[int, Sequence[int]], least: int
    ) -> dict[int, dict[int, str]]:
        """Step 4: what each confirms to each of the others, that all were given the same list."""
        body = {"kind": MASK_CONFIRM, "session": self._session, "answered": list(answered), "gone": list(gone)}
        found: dict[int, dict[int, str]] = {}
        abouts = set()
        for client, answer in self._asked(dict.fromkeys(answered, body), MASK_CONFIRM, least, drops=False):
            given, about = _by_client(answer.get("proofs")), answer.get("about")
            if given is not None and set(given) == set(around[client]) & set(answered) - {client} and _is_text(about):
                found[client] = given
                abouts.add(str(about))
        if len(abouts) > 1:
            raise MaskError("sites were not all sent the same model and settings, so that their masks do not cancel")
        self._about = next(iter(abouts), "")
        return found

    def _asked(
        self, bodies: Mapping[int, Tree], name: str, least: int, *, trains: bool = False, drops: bool = True
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The answers that are some; who gave none is dropped, unless its update is in the sum already."""
        for client, answer in self._exchange(bodies, name, least, trains):
            if isinstance(answer, dict) and "error" not in answer and "failure" not in answer:
                yield client, answer
            elif drops:
                self._fail(client, answer["failure"] if trains else failure_reason(answer))
            else:
                log.warning("client %s helps no more to unmask the sum: %s", client, failure_reason(answer))

    def _fail(self, client: int, reason: str) -> None:
        self._failures[client] = reason

    def _check_enough(self, found: Mapping[int, Any], what: str) -> None:
        if len(found) < self._least:
            last = next(reversed(self._failures.values()), "no answer")
            raise MaskError(
                f"{len(found)} sites sent {what}, and a sum needs {self._least}; the last one dropped: {last}"
            )


def _is_text(given: Any) -> bool:
    return isinstance(given, str) and len(given) <= _LONGEST


def _by_client(given: Any) -> dict[int, str] | None:
    """Texts by client; None if they are not."""
    if not isinstance(given, dict) or not all(map(_is_text, given.values())):
        return None
    if not all(isinstance(key, str) and key.isdecimal() and len(key) < 12 for key in given):
        return None
    return {int(key): value for key, value in given.items()}
