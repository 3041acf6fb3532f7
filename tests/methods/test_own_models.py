"""Methods whose clients keep their own networks: their losses by hand, what they reduce to, and what servers make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.core.weights import FlatNet
from fedstill.methods import registry
from fedstill.methods.fedkd import compressed, decompressed
from fedstill.methods.fedtgp import TrainablePrototypes, largest_gap, margin_loss
from fedstill.methods.lg_fedavg import head_places
from fedstill.models import build
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from fedstill.train.task import classifier
from support.core import same
from support.quick import TINY, quick
from support.recorder import record_rounds
from support.wiretap import client_of, client_states, kl_divergence, setup_of, softmax

Y = torch.tensor([1, 2, 1, 9, 7, 0])
BATCH = Batch(torch.zeros(6, 1, 16, 16), Y, torch.arange(6))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_outputs(seed: int, width: int = 84) -> Outputs:
    return Outputs(drawn(6, 10, seed=seed), drawn(6, width, seed=seed + 1))


def labels_loss(out: Outputs) -> float:
    likely = softmax(out.logits.double().numpy())
    return float(-np.log(likely[np.arange(6), Y.numpy()]).mean())


def divergence(teacher: Outputs, student: Outputs) -> float:
    return float(kl_divergence(teacher.logits.double().numpy(), student.logits.double().numpy()).mean())


# --- losses ---------------------------------------------------------------------------------------------------------


def test_fedproto_pulls_features_to_the_prototype_of_their_class_if_there_is_one() -> None:
    setup = setup_of("fedproto", hyper={"lambda": 0.7})
    prototypes, known = drawn(10, 84, seed=1), torch.ones(10)
    known[[2, 7]] = 0
    objective = setup.method.objective(client_of(setup, 0, 2, {"prototypes": prototypes, "known": known}))
    out = some_outputs(3)
    assert objective.term is not None
    away = (out.features.double() - prototypes.double()[Y]).numpy()
    each = [(row**2).mean() for row, label in zip(away, Y.tolist(), strict=True) if label not in (2, 7)]
    assert float(objective.term(BATCH, out)) == pytest.approx(0.7 * sum(each) / 6, rel=1e-5)


def test_fml_teaches_both_networks_and_each_by_its_own_loss_alone() -> None:
    own, shared = some_outputs(5), some_outputs(8)
    for out in (own, shared):
        out.logits.requires_grad_()
    loss = registry.make("fml", {"alpha": 0.3, "beta": 0.8}).mutual_loss(BATCH, own, shared)  # type: ignore[attr-defined]
    loss.backward()
    plain = [Outputs(out.logits.detach(), out.features) for out in (own, shared)]
    of_own = 0.3 * labels_loss(plain[0]) + 0.7 * divergence(plain[1], plain[0])
    of_shared = 0.8 * labels_loss(plain[1]) + 0.2 * divergence(plain[0], plain[1])
    assert loss.item() == pytest.approx(of_own + of_shared, rel=1e-5)
    p, q = (torch.from_numpy(softmax(out.logits.double().numpy())) for out in plain)
    expected = (0.3 * (p - F.one_hot(Y, 10)) + 0.7 * (p - q)) / 6  # of softmax, by hand
    assert own.logits.grad is not None
    torch.testing.assert_close(own.logits.grad.double(), expected, rtol=1e-4, atol=1e-7)


def test_fedkd_weighs_distillation_by_how_well_both_networks_do() -> None:
    own, shared, mapped = some_outputs(5), some_outputs(8, width=20), drawn(6, 84, seed=11)
    loss = registry.make("fedkd").mutual_loss(BATCH, own, shared, mapped)  # type: ignore[attr-defined]
    labels = labels_loss(own) + labels_loss(shared)
    features = float(((own.features - mapped).double() ** 2).mean())
    taught = divergence(shared, own) + divergence(own, shared) + features
    assert loss.item() == pytest.approx(labels + taught / labels, rel=1e-5)


def test_fedtgp_keeps_classes_apart_by_the_margin() -> None:
    net = TrainablePrototypes(10, 4)
    x = drawn(6, 4, seed=2)
    loss = margin_loss(1.5)(BATCH, Outputs(*net.both(x)))
    prototypes = net.prototypes().detach().double().numpy()
    away = np.sqrt(((x.double().numpy()[:, None] - prototypes[None]) ** 2).sum(2))
    away[np.arange(6), Y.numpy()] += 1.5
    expected = np.mean([a[y] + np.log(np.exp(-a).sum()) for a, y in zip(away, Y.tolist(), strict=True)])
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_margin_is_the_largest_distance_to_a_nearest_class() -> None:
    means = drawn(7, 3, seed=4).double().numpy()
    apart = np.linalg.norm(means[:, None] - means[None], axis=2) + np.diag(np.full(7, np.inf))
    assert largest_gap(torch.from_numpy(means)) == pytest.approx(apart.min(1).max())
    assert largest_gap(torch.from_numpy(means[:1])) == 0


# --- what crosses ---------------------------------------------------------------------------------------------------


def test_factors_hold_the_share_of_the_energy_and_no_more_than_needed() -> None:
    net = FlatNet(build("cnn", (1, 16, 16), 10))
    change = drawn(net.size, seed=1)
    dense = [e for e in net.entries if len(e.shape) == 2]
    for entry in dense:  # nearly of rank 2, as updates are
        low = drawn(entry.shape[0], 2, seed=2) @ drawn(2, entry.shape[1], seed=3)
        entry.view(change).copy_(low + 0.01 * entry.view(change))
    factors, ranks = compressed(change, net.entries, 0.95)
    restored = decompressed(factors, ranks.tolist(), net.entries)
    assert restored is not None
    assert len(factors) < net.size / 4
    for entry, rank in zip(net.entries, ranks.tolist(), strict=True):
        before, after = (entry.view(v).double().numpy().reshape(entry.shape[0], -1) for v in (change, restored))
        if rank == 0:
            np.testing.assert_array_equal(after, before)
            continue
        energies = np.linalg.svd(before, compute_uv=False) ** 2
        assert energies[:rank].sum() >= 0.95 * energies.sum() > energies[: rank - 1].sum()
        left_out = ((before - after) ** 2).sum()
        assert left_out == pytest.approx(energies[rank:].sum(), rel=1e-3)


@pytest.mark.parametrize("change", ["longer", "shorter", "larger rank"])
def test_a_lie_about_ranks_is_left_out(change: str) -> None:
    net = FlatNet(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 2)))
    factors, ranks = compressed(torch.ones(net.size), net.entries, 0.9)
    lies = {
        "longer": (torch.cat([factors, torch.ones(1)]), ranks),
        "shorter": (factors[:-1], ranks),
        "larger rank": (factors, ranks + 10**9),
    }
    assert decompressed(factors, ranks.tolist(), net.entries) is not None
    assert decompressed(lies[change][0], lies[change][1].tolist(), net.entries) is None


def test_prototypes_are_the_mean_features_of_a_class_and_the_servers_the_mean_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    result = fedstill.run("fedproto", **TINY | {"rounds": 2}, out=tmp_path / "run")
    assert result.summary["bytes_up"] > 0
    sent = crossings[0].up.values()
    for label in range(10):
        rows = [message["prototypes"][label] for message in sent if message["known"][label]]
        if rows:
            expected = torch.stack(rows).double().mean(0).float()
            torch.testing.assert_close(crossings[1].down["prototypes"][label], expected)
    setup = setup_of("fedproto", **{k: v for k, v in TINY.items() if k != "engine"} | {"rounds": 2})
    last = crossings[1]
    client, message = next(iter(last.up.items()))
    index = setup.federation.train(client)
    net = setup.task.build()
    net.load(client_states(tmp_path / "run")[client]["model"])
    data = setup.task.dataset
    features = classifier(net).features(data.normalise(data.train.x[index])).detach().numpy()
    for label in np.unique(data.train.y.numpy()[index]):
        mean = features[data.train.y.numpy()[index] == label].mean(0)
        np.testing.assert_allclose(message["prototypes"][label].numpy(), mean, rtol=1e-4, atol=1e-5)


def test_lg_fedavg_averages_the_head_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = record_rounds(monkeypatch)
    fedstill.run("lg-fedavg", **TINY | {"rounds": 2}, out=tmp_path / "run")
    setup = setup_of("lg-fedavg", **{k: v for k, v in TINY.items() if k != "engine"})
    sizes = setup.federation.sizes
    first = crossings[0].up
    expected = sum(sizes[k] * up["head"].double() for k, up in first.items()) / sum(sizes[k] for k in first)
    torch.testing.assert_close(crossings[1].down["head"].double(), expected, rtol=1e-6, atol=1e-7)
    net = setup.task.build()
    head = [parameter.detach().flatten() for parameter in classifier(net).head.parameters()]
    assert torch.equal(net.vector[head_places(net)], torch.cat(head))


# --- reductions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "own"), [("fedproto", {"lambda": 0.0}), ("fml", {"alpha": 1.0})])
def test_without_a_say_of_the_others_it_is_local_training_bit_for_bit(
    method: str, own: dict[str, Any], tmp_path: Path
) -> None:
    settings = quick(method) | {"rounds": 2}
    own = own | ({"shared": settings.pop("shared")} if "shared" in settings else {})
    fedstill.run(method, **settings, hyper=own, out=tmp_path / "taught")
    fedstill.run("local", **TINY | {"rounds": 2}, out=tmp_path / "local")
    taught, alone = client_states(tmp_path / "taught"), client_states(tmp_path / "local")
    assert taught.keys() == alone.keys()
    assert all(same(taught[k]["model"], alone[k]["model"]) for k in alone)
