"""Noisy votes: what one client can move, the noise on the counts, and that the model learns the winners alone."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

import fedstill
from fedstill.core import seeds
from fedstill.core.store import Store
from fedstill.methods import votes as module
from fedstill.methods.base import Server, Uplink, fault
from fedstill.methods.fedmd import FedMD
from fedstill.methods.votes import Votes, votes
from fedstill.privacy.accounting import Plan, epsilon
from fedstill.privacy.noise import gaussian
from fedstill.running.directory import RunDirectory
from support.runs import SMALL, numbers, weights
from support.wiretap import (
    BATCH,
    assert_as_declared,
    assert_same_network,
    assert_same_tree,
    client_states,
    descend,
    exact,
    network,
    normalised,
    resumed_after_every_round,
    setup_of,
    taped,
)

accounting = pytest.importorskip("dp_accounting")

NEEDED: dict[str, Any] = {"pool": 0.2, "proxy": "pool", "fraction": 0.1, "model": "mlp", "image_size": 16}
LITTLE = 1e-9


@pytest.fixture
def server(tmp_path: Path) -> Server:
    setup = setup_of("fedavg", **NEEDED)
    found = Server(setup.task, np.full(6, 1), Store(tmp_path), setup.pool())
    found.round, found.drawn = 1, (6, 4)
    return found


def ups(server: Server, count: int, scale: float = 1.0) -> list[Uplink]:
    rng = torch.Generator().manual_seed(0)
    return [
        Uplink(k, 1, {"model": server.model + scale * torch.randn(server.model.shape, generator=rng)})
        for k in range(count)
    ]


def test_every_client_has_one_vote_a_sample_by_its_own_model(server: Server) -> None:
    assert server.task.proxy is not None
    clients = ups(server, 5)
    counts = votes(server, iter(clients), server.task.proxy)
    expected = np.zeros(counts.shape)
    for up in clients:  # by the network itself, sample by sample
        net = server.task.build()
        net.load(up["model"])
        net.module.eval()
        with torch.no_grad():
            said = net.module(server.task.proxy.x(torch.arange(len(server.task.proxy)))).argmax(1).numpy()
        expected[np.arange(len(said)), said] += 1
    np.testing.assert_array_equal(counts.numpy(), expected)


@pytest.mark.parametrize("left_out", range(4))
def test_no_client_moves_the_counts_by_more_than_the_root_of_the_queries(server: Server, left_out: int) -> None:
    """Also one whose weights are as large as they can be."""
    assert server.task.proxy is not None
    clients = [*ups(server, 3), ups(server, 1, scale=1e18)[0]]
    others = [up for k, up in enumerate(clients) if k != left_out]
    moved = votes(server, iter(clients), server.task.proxy) - votes(server, iter(others), server.task.proxy)
    assert float(moved.norm()) == pytest.approx(math.sqrt(len(server.task.proxy)))


def test_the_noise_on_the_counts_has_the_size_that_is_accounted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 queries with noise multiplier 3, the noise on each count has deviation 3 sqrt(60)."""
    drawn: list[torch.Tensor] = []

    def spy(server: Server, uplinks: Any, samples: Any) -> torch.Tensor:
        drawn.append(torch.zeros(len(samples), 10, dtype=torch.float64))
        return drawn[-1]

    noisy: list[torch.Tensor] = []
    argmax = torch.Tensor.argmax
    monkeypatch.setattr(module, "votes", spy)

    def winners(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        noisy.append(self)
        return argmax(self, *args, **more)

    monkeypatch.setattr(torch.Tensor, "argmax", winners)
    method = Votes(noise_multiplier=3.0, queries=60, server_epochs=1)
    method.start(server)
    for round_ in range(1, 12):
        server.round = round_
        method.aggregate(server, iter(()))
    found = torch.cat([each.flatten() for each in noisy if each.shape == (60, 10)]).numpy()
    assert len(found) == 11 * 600
    assert stats.kstest(found, stats.norm(0, 3.0 * math.sqrt(60)).cdf).pvalue > 0.001


def test_with_little_noise_the_model_learns_what_most_say_and_nothing_of_their_weights(server: Server) -> None:
    """Two sets of clients whose votes are the same leave the same bits, whatever their weights are."""
    method = Votes(noise_multiplier=LITTLE, queries=50)
    clients = ups(server, 1)
    single = torch.zeros_like(server.model)
    results = []
    for group in (clients * 3, [*clients * 3, Uplink(9, 1, {"model": single})]):
        server.model = server.task.initial
        method.start(Server(server.task, server.sizes, server.store))
        server.state = {"votes": {"rounds": []}}
        method.aggregate(server, iter(group))
        results.append(server.model)
    assert torch.equal(*results)  # one vote against three changes no label
    assert not torch.equal(results[0], server.task.initial)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("scaffold+votes", {}, "makes nothing of what clients send but votes, and scaffold does"),
        ("feddf+votes", {}, "feddf does"),
        ("fedavg+t1+votes", {}, "and fedavg\\+t1 does"),
        ("fedavg+votes", {"proxy": ""}, "votes needs proxy data"),
        ("fedmd+votes", {}, "^votes covers votes alone, and fedmd averages weights too: set average_weights=false$"),
        ("fedmd+t1+votes", {}, "and fedmd\\+t1 does"),
        ("fedmd+votes", {"proxy": "", "average_weights": False}, "fedmd needs public samples"),
        ("fedmd+votes", {"secure_aggregation": True, "average_weights": False}, "works with what single clients sent"),
        ("fedavg+votes+dp", {"hyper": {}}, "would use what clients send as it comes"),
        ("fedavg+votes", {"secure_aggregation": True}, "works with what single clients sent"),
        ("fedavg+votes", {"model": "resnet8", "model_options": {"norm": "batch"}}, "BatchNorm's statistics"),
    ],
)
def test_what_does_more_with_updates_is_refused(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        setup_of(name, **NEEDED | {"hyper": {"noise_multiplier": 1.0}} | settings)


def test_a_run_finds_its_noise_accounts_for_it_and_repeats() -> None:
    settings = SMALL | NEEDED | {"rounds": 2, "eval_every": 2, "target_epsilon": 4.0, "delta": 1e-3, "queries": 40}
    result, again = (fedstill.run("fedprox+votes", **settings | {"engine": e}) for e in ("inline", "process"))
    assert 3.9 < result.summary["epsilon"] <= 4.0
    noise = result.summary["privacy"]["noise_multiplier"]
    assert result.summary["epsilon"] == pytest.approx(epsilon(Plan(6, 3, 2), noise, 1e-3))
    assert torch.equal(weights(result), weights(again))


# --- FedMD ------------------------------------------------------------------------------------------------------------

FEDMD: dict[str, Any] = NEEDED | {"average_weights": False, "queries": 40, "noise_multiplier": LITTLE, "weight": 0.8}


def leaders(ballots: list[int]) -> set[int]:
    """The classes with most votes."""
    counts = Counter(ballots)
    return {label for label, count in counts.items() if count == max(counts.values())}


@pytest.mark.parametrize("digest", ["joint", "first"])
def test_without_noise_fedmds_clients_learn_the_plurality_vote(digest: str, tmp_path: Path) -> None:
    """CE + weight CE(voted class) on public samples that were voted on, or an epoch of the latter before."""
    settings = FEDMD | {"digest": digest, "model": "cnn", "sampling": "fixed", "participation": 1.0}
    result, (first, second) = taped("fedmd+votes", rounds=2, checkpoint_every=1, out=tmp_path / "run", **settings)
    assert_as_declared("fedmd+votes", [first, second], **settings)
    setup = setup_of("fedmd+votes", **settings)
    assert setup.task.proxy is not None
    x = setup.task.proxy.x(torch.arange(len(setup.task.proxy)))
    store = RunDirectory(tmp_path / "run").client_store
    before, after = ({k: store.read(k, before=r + 1) or {} for k in first.up} for r in (1, 2))
    for k, up in second.up.items():
        logits = exact(network(after[k]["model"]), x)[0]
        margin = np.diff(np.sort(logits, axis=1)[:, -2:]).ravel()
        np.testing.assert_array_equal(up["vote"].numpy()[margin > 1e-4], logits.argmax(1)[margin > 1e-4])
    asked = torch.randperm(len(x), generator=seeds.torch_rng(0, "server: voted samples", 1))[:40]
    voted = second.down["voted"]
    assert set(torch.nonzero(voted >= 0).flatten().tolist()) == set(asked.tolist())
    leading = [leaders([int(up["vote"][i]) for up in first.up.values()]) for i in asked.tolist()]
    assert all(int(label) in best for label, best in zip(voted[asked], leading, strict=True))
    assert sum(len(best) == 1 for best in leading) >= 10  # where no tie leaves it open
    places = torch.tensor(sorted(asked.tolist()))
    public_x, labels = x[places], voted[places]
    dataset = setup.federation.dataset
    for k in second.up:
        index = torch.from_numpy(setup.federation.train(k))
        own_x, own_y = normalised(dataset.train.x[index]), dataset.train.y[index]
        net, rng = network(before[k]["model"]), seeds.torch_rng(0, "public samples", 2, k)
        if digest == "first":
            for ids in torch.randperm(40, generator=seeds.torch_rng(0, "digest", 2, k)).split(256):
                descend(net, F.cross_entropy(net(public_x[ids]), labels[ids]))
        for ids in torch.randperm(len(own_y), generator=seeds.torch_rng(0, "batches", 2, k)).split(BATCH):
            loss = F.cross_entropy(net(own_x[ids]), own_y[ids])
            if digest == "joint":
                drawn = torch.randint(0, 40, (len(ids),), generator=rng)
                loss = loss + 0.8 * F.cross_entropy(net(public_x[drawn]), labels[drawn])
            descend(net, loss)
        assert_same_network(after[k]["model"], net)
    assert result.records[-1]["accuracy"] is not None


def test_fedmds_server_sees_classes_alone_and_sends_noisy_winners_alone() -> None:
    setup = setup_of("fedmd+votes", **FEDMD)
    wire, public = setup.method.wire(setup.task), len(setup.task.proxy or ())
    assert {name: (part.shape, part.dtype) for name, part in wire.down.items()} == {"voted": ((public,), torch.int64)}
    assert {name: (part.shape, part.dtype) for name, part in wire.up.items()} == {"vote": ((public,), torch.int64)}
    assert fault({"vote": torch.full((public,), 10)}, wire.up) == "vote holds numbers above 9"
    assert fault({"vote": torch.full((public,), -1)}, wire.up) == "vote holds numbers below 0"


@pytest.mark.parametrize("noise", [LITTLE, 2.0, 50.0])
def test_fedmds_labels_depend_on_votes_through_noisy_counts_alone(server: Server, noise: float) -> None:
    """The noise is the stream's, with deviation noise sqrt(40) on each count of the 40 samples that are voted on."""
    assert server.task.proxy is not None
    method = Votes(noise_multiplier=noise, queries=40, inner=FedMD(average_weights=False))
    method.start(server)
    there = len(server.task.proxy)
    rng = torch.Generator().manual_seed(1)
    ballots = [torch.randint(0, 10, (there,), generator=rng) for _ in range(5)]
    method.aggregate(server, (Uplink(k, 1, {"vote": ballot}) for k, ballot in enumerate(ballots)))
    asked = torch.randperm(there, generator=server.stream("voted samples"))[:40]
    counts = np.array([[sum(int(b[i]) == c for b in ballots) for c in range(10)] for i in asked.tolist()])
    drawn = gaussian(400, server.stream("vote noise")).view(40, 10).numpy()
    assert server.state["voted"][asked].tolist() == (counts + noise * math.sqrt(40) * drawn).argmax(1).tolist()
    assert int((server.state["voted"] >= 0).sum()) == 40
    assert "logits" not in server.state


def test_fedmds_epsilon_is_that_of_as_many_sampled_gaussian_mechanisms(tmp_path: Path) -> None:
    """After a round by its integral, then by composing events; the same on both engines, and resumed."""
    settings = SMALL | FEDMD | {"noise_multiplier": 1.3, "delta": 1e-3}
    result, again = (
        fedstill.run("fedmd+votes", **settings | {"engine": e, "out": tmp_path / e}) for e in ("inline", "process")
    )
    z = np.linspace(-15, 16, 1_000_001)
    without = stats.norm(0, 1.3).pdf(z)
    with_client = 0.5 * without + 0.5 * stats.norm(1, 1.3).pdf(z)  # a vote moves the counts by one in its direction
    grown = math.exp(result.records[0]["epsilon"])
    deltas = [
        np.trapezoid(np.maximum(p - grown * q, 0), z) for p, q in ((with_client, without), (without, with_client))
    ]
    assert max(deltas) == pytest.approx(1e-3, rel=0.01)
    composed = accounting.pld.PLDAccountant(accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for record in result.records:
        composed.compose(accounting.PoissonSampledDpEvent(0.5, accounting.GaussianDpEvent(1.3)))
        assert record["epsilon"] == pytest.approx(composed.get_epsilon(1e-3), rel=1e-3)
        assert {"clients' own models", "accuracy", "local_accuracy"} <= set(record["privacy"]["not covered"])
        assert record["privacy"]["not sent"] == ["train_loss"]
    del settings["rounds"]
    resumed = resumed_after_every_round("fedmd+votes", tmp_path / "resumed", 3, **settings)
    for other in (again, resumed):
        assert numbers(other) == numbers(result)
    states = [client_states(tmp_path / name) for name in ("inline", "process", "resumed")]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for k in state:
            assert_same_tree(state[k], states[0][k])


def test_fedmds_budget_ends_the_run_before_it_is_overspent() -> None:
    noise, delta = 1.3, 1e-3
    budget = epsilon(Plan(6, 3, 2), noise, delta)
    settings = SMALL | FEDMD | {"rounds": 5, "noise_multiplier": noise, "delta": delta, "target_epsilon": budget + 1e-6}
    assert len(fedstill.run("fedmd+votes", **settings).records) == 2


def test_fedmds_clients_may_have_different_networks() -> None:
    settings = {key: value for key, value in (SMALL | FEDMD).items() if key != "model"}
    result = fedstill.run("fedmd+votes", **settings | {"models": ["mlp", "cnn"], "noise_multiplier": 1.0})
    assert all(record["dropped"] == 0 for record in result.records)
