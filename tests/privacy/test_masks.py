"""Secure aggregation: the sum comes out whoever is gone, one vector never does, and a server that cheats is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from fedstill.privacy import fixed_point
from fedstill.privacy.masks import MaskError, Participant, confirmations, neighbours, unmask

SESSION = "a sum"


class Sum:
    """All sides of one sum, up to where everybody has masked its vector."""

    def __init__(self, vectors: dict[int, Tensor], most: int = 100, gone: tuple[int, ...] = ()) -> None:
        self.everyone = {client: Participant(client, SESSION) for client in vectors}
        self.keys = {client: each.public_keys() for client, each in self.everyone.items()}
        self.around = neighbours(sorted(vectors), most)
        sent, self.digests = {}, {}
        for client, each in self.everyone.items():
            near = {k: self.keys[k] for k in self.around[client]}
            sent[client], self.digests[client] = each.share(near, clients=list(vectors), most=most)
        self.gone = sorted(gone)
        self.masked = {}
        for client in sorted(set(vectors) - set(gone)):
            received = {k: sent[k][client] for k in self.around[client] if k != client}
            self.masked[client] = self.everyone[client].mask(received, vectors[client])

    def reveal(self, *without: int) -> dict[int, dict[int, str]]:
        """What those who answered, and are there still, give away."""
        proofs = {k: self.everyone[k].confirm(list(self.masked), self.gone) for k in self.masked}
        return {
            client: self.everyone[client].reveal(proofs_for(client, proofs))
            for client in self.masked
            if client not in without
        }

    def total(self, revealed: dict[int, dict[int, str]]) -> Tensor:
        return unmask(
            SESSION,
            self.masked.values(),
            list(self.masked),
            self.gone,
            keys=self.keys,
            around=self.around,
            digests=self.digests,
            revealed=revealed,
        )


def proofs_for(client: int, proofs: dict[int, dict[int, str]]) -> dict[int, str]:
    return {sender: given[client] for sender, given in proofs.items() if client in given}


def vectors(*clients: int, size: int = 50) -> dict[int, Tensor]:
    draw = np.random.default_rng(0)
    return {k: torch.from_numpy(draw.integers(-(2**46), 2**46, size)) for k in clients}


@pytest.mark.parametrize(
    ("most", "gone", "silent"),
    [(100, (), ()), (100, (5,), ()), (100, (), (2,)), (100, (5, 9), (2,)), (4, (5,), (9,))],
)
def test_the_sum_is_that_of_whoever_answered(most: int, gone: tuple[int, ...], silent: tuple[int, ...]) -> None:
    given = vectors(2, 3, 5, 7, 9, 11, 12)
    run = Sum(given, most, gone)
    expected = torch.stack([vector for client, vector in given.items() if client not in gone]).sum(0)
    assert torch.equal(run.total(run.reveal(*silent)), expected)


def test_with_too_few_to_unmask_there_is_no_sum() -> None:
    run = Sum(vectors(1, 2, 3, 4))
    with pytest.raises(MaskError, match="2 of the 4 who hold shares of client 1 answered, 3 must"):
        run.total(run.reveal(1, 2))


def test_masked_vectors_look_uniform_and_independent() -> None:
    zeros = {k: torch.zeros(4096, dtype=torch.int64) for k in (1, 2, 3)}
    masked = [vector.numpy().view(np.uint8) for vector in Sum(zeros).masked.values()]
    for seen in (*masked, masked[0] - masked[1], masked[0] + masked[1]):
        assert chisquare(np.bincount(seen, minlength=256)).pvalue > 1e-6


def test_a_share_that_was_changed_is_noticed() -> None:
    run = Sum(vectors(1, 2, 3), gone=(3,))
    revealed = run.reveal()
    for client in (1, 3):  # of one who answered, and of one who did not
        share = bytearray.fromhex(revealed[1][client])
        share[-1] ^= 1
        with pytest.raises(MaskError, match="do not fit together"):
            run.total({1: revealed[1] | {client: share.hex()}, 2: revealed[2]})


def test_a_client_refuses_a_server_that_could_single_it_out() -> None:
    run = Sum(vectors(1, 2, 3, 4))
    first = run.everyone[1]
    for answered, gone in (([1, 2, 3, 4], [4]), ([1, 2, 3], []), ([2, 3, 4], [1]), ([1], [2, 3, 4]), ([1, 2], [3, 4])):
        with pytest.raises(MaskError):
            first.confirm(answered, gone)
    with pytest.raises(MaskError, match="too few"):
        first.confirm([1, 2, 3, 4], [], least=5)
    with pytest.raises(MaskError, match="before the list"):
        first.reveal({})
    first.confirm([1, 2, 3, 4], [])
    with pytest.raises(MaskError, match="a second one"):
        first.confirm([1, 2, 3], [4])
    with pytest.raises(MaskError):
        first.mask({}, torch.zeros(3, dtype=torch.int64))


def test_a_server_that_tells_clients_different_lists_learns_nothing() -> None:
    """The attack: some are told that client 5 answered, others that it is gone, and its two secrets are revealed."""
    run = Sum(vectors(1, 2, 3, 4, 5))
    told = {k: ([1, 2, 3, 4, 5], []) if k in (1, 2, 5) else ([1, 2, 3, 4], [5]) for k in run.masked}
    proofs = {k: run.everyone[k].confirm(*told[k]) for k in run.masked}
    for client, each in run.everyone.items():
        with pytest.raises(MaskError, match=r"of 5 clients were given this list|client 5 has nothing"):
            each.reveal(proofs_for(client, proofs))


def test_a_server_that_gives_clients_different_circles_learns_nothing() -> None:
    """The attack: two circles of client 0's neighbours, each of one mind, and two helpers who are in both.

    Client 0 divides its secrets among nine. Of these, 1 to 3 know each other and client 0 alone, and are told that it
    answered; 4 to 6 likewise, and that it is gone. With 7 and 8, the helpers, both secrets would be put together.
    """
    everyone = {client: Participant(client, SESSION) for client in range(9)}
    keys = {client: each.public_keys() for client, each in everyone.items()}
    circles = {k: (0, 1, 2, 3) if k in (1, 2, 3) else (0, 4, 5, 6) if k in (4, 5, 6) else range(9) for k in everyone}
    sent = {k: each.share({other: keys[other] for other in circles[k]})[0] for k, each in everyone.items()}
    for client in range(1, 7):
        received = {k: sent[k][client] for k in circles[client] if k != client}
        with pytest.raises(MaskError, match="shares of client 0 cannot be read"):
            everyone[client].mask(received, torch.zeros(3, dtype=torch.int64))


def test_a_client_works_out_who_its_neighbours_are() -> None:
    each = {client: Participant(client, SESSION) for client in range(7)}
    keys = {client: one.public_keys() for client, one in each.items()}
    for near, clients in (((0, 1, 2, 3, 4), range(7)), ((0, 1, 6), range(7)), ((0, 1, 2, 5, 6), range(1, 7))):
        with pytest.raises(MaskError, match="next to this client"):
            each[0].share({k: keys[k] for k in near}, clients=list(clients), most=4)
    assert sorted(each[0].share({k: keys[k] for k in (0, 1, 2, 5, 6)}, clients=range(7), most=4)[0]) == [1, 2, 5, 6]


def test_a_server_cannot_make_or_reuse_what_clients_confirm_to_each_other() -> None:
    run, other = Sum(vectors(1, 2, 3, 4)), Sum(vectors(1, 2, 3, 4))
    proofs = {k: run.everyone[k].confirm([1, 2, 3, 4], []) for k in run.masked}
    strange = {k: other.everyone[k].confirm([1, 2, 3, 4], []) for k in other.masked}
    own = proofs[1]  # what client 1 made itself, sent back to it
    for given in (proofs_for(1, strange), own, {2: proofs[2][3], 3: proofs[3][2]}, {2: "0" * 64, 3: "0" * 64}):
        with pytest.raises(MaskError, match="1 of 4 clients were given this list"):
            run.everyone[1].reveal(given)
    with pytest.raises(MaskError, match="nothing to confirm"):
        run.everyone[1].reveal({1: own[2]})
    shares = run.everyone[1].reveal(proofs_for(1, proofs))  # honest ones still count
    assert sorted(shares) == [1, 2, 3, 4]
    with pytest.raises(MaskError, match="twice"):
        run.everyone[1].reveal(proofs_for(1, proofs))


@pytest.mark.parametrize("clients", range(2, 60))
def test_no_two_lists_are_confirmed_by_enough(clients: int) -> None:
    """By counting: helpers of the server confirm both lists, everybody else one of them."""
    helpers = -(-clients // 3) - 1  # fewer than a third
    honest = clients - helpers
    assert all(min(one, honest - one) + helpers < confirmations(clients) for one in range(honest + 1))
    assert confirmations(clients) <= clients


def test_a_client_refuses_keys_that_are_not_those_of_as_many_others() -> None:
    first, second = Participant(1, SESSION), Participant(2, SESSION)
    own, other = first.public_keys(), second.public_keys()
    for keys in ({1: own}, {1: other, 2: other}, {1: own, 2: other, 3: other}, {2: other}):
        with pytest.raises(MaskError):
            first.share(keys)
    with pytest.raises(MaskError, match="at least 3"):
        first.share({1: own, 2: other}, least=3)
    first.share({1: own, 2: other})
    with pytest.raises(MaskError, match="1 of 2"):
        first.mask({}, torch.zeros(3, dtype=torch.int64))


def test_the_fixed_point_mean_is_the_mean_to_half_a_unit() -> None:
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (7, 1000)))
    total = torch.stack([fixed_point.to_integers(row) for row in x]).sum(0)
    assert (fixed_point.mean_of(total, 7, torch.float64) - x.mean(0)).abs().max() < 2**-31 + 1e-12
    assert fixed_point.can_be_sum(total, 7)
    assert not fixed_point.can_be_sum(torch.tensor([2**62]), 7)
