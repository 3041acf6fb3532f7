"""Attacks: what an attacker changes, and that nobody else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.attacks.attack import draw_attackers
from fedstill.building.config import resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core import seeds
from fedstill.core.choices import AttackKind
from fedstill.core.tree import Message
from fedstill.core.weights import FlatNet
from fedstill.methods import registry
from fedstill.methods.base import Method, Part, Server, Uplink, Wire
from fedstill.train.client import Client
from fedstill.train.task import Task
from support.recorder import Round, record_rounds
from support.runs import SMALL, RunSmall, numbers, weights

QUICK: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "participation": 1.0,
    "rounds": 1,
    "fraction": 0.05,
}
ON_UPDATES: dict[AttackKind, float] = {"noise": 1.0, "sign-flip": 1.0, "scale": 3.0}  # and attack_scale
ALL: dict[AttackKind, float] = {"label-flip": 1.0, "mirror-flip": 1.0, **ON_UPDATES}


def prepared(method: str = "fedavg", **settings: Any) -> Setup:
    return prepare(resolve({**SMALL, **QUICK, "method": method, **settings}))


def uploads(crossings: list[Round]) -> dict[int, Message]:
    """What each client sent in the first round."""
    return crossings[0].up


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddistill-plus"])
def test_honest_clients_send_the_same_bits_and_attackers_do_not(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    crossings = record_rounds(monkeypatch)
    run_small(method, **QUICK)
    honest = uploads(crossings)
    attackers = prepared(attack="noise", attackers=2).attack.clients
    assert len(attackers) == 2
    for kind, scale in ALL.items():
        crossings.clear()
        run_small(method, **QUICK, attack=kind, attackers=2, attack_scale=scale)
        for k, message in uploads(crossings).items():
            same = {part: torch.equal(tensor, honest[k][part]) for part, tensor in message.items()}
            assert same.pop("model") == (k not in attackers)
            if k not in attackers or kind in ON_UPDATES:
                assert all(same.values()), "what else is sent is as it was"


class Labels(fedstill.FedAvg):
    """Clients also say how many samples of each class they see, in all and in some of them."""

    def wire(self, task: Task) -> Wire:
        plain, counts = super().wire(task), Part((2, task.classes), "counts", torch.int64)
        return Wire(plain.down, plain.up | {"counts": counts})

    def uplink(self, client: Client) -> Message:
        some = client.data.take(torch.arange(5))
        counted = [torch.bincount(y, minlength=client.task.classes) for y in (client.data.y, some.y)]
        return super().uplink(client) | {"counts": torch.stack(counted)}


def test_label_attacks_change_the_attackers_training_labels_alone(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings = record_rounds(monkeypatch)
    found = []
    kinds: list[AttackKind] = ["label-flip", "mirror-flip"]
    for settings in ({}, *({"attack": kind, "attackers": 2, "attack_class": 3} for kind in kinds)):
        crossings.clear()
        run_small(Labels(), **QUICK, **settings)
        found.append({k: message["counts"] for k, message in uploads(crossings).items()})
    plain, flipped, mirrored = found
    attackers = prepared(attack="label-flip", attackers=2).attack.clients
    for k, counts in plain.items():
        if k in attackers:
            every_sample = nn.functional.one_hot(torch.tensor(3), 10) * counts.sum(1, keepdim=True)
            assert torch.equal(flipped[k], every_sample)
            assert torch.equal(mirrored[k], counts.flip(1))
        else:
            assert torch.equal(flipped[k], counts)
            assert torch.equal(mirrored[k], counts)


def test_evaluation_is_on_true_labels(run_small: RunSmall) -> None:
    """With a rate that changes nothing, a run of attackers alone scores as one without any."""
    settings = QUICK | {"lr": 1e-30}
    plain, attacked = run_small(**settings), run_small(**settings, attack="mirror-flip", attackers=6)
    timeless = [{k: v for k, v in numbers(r)[0].items() if k != "train_loss"} for r in (plain, attacked)]
    assert timeless[0] == timeless[1]


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_UPDATES)
def test_update_attacks_are_what_their_formulas_say(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, kind: AttackKind
) -> None:
    crossings, settings = record_rounds(monkeypatch), QUICK | {"model": normed, "model_options": {}, "seed": 4}
    scale = 2.0 if kind == "noise" else ON_UPDATES[kind]
    run_small(**settings)
    run_small(**settings, attack=kind, attackers=2, attack_scale=scale)
    w_t, learnt, sent = crossings[0].down["model"].numpy(), *(uploads([c]) for c in crossings)
    net = FlatNet(normed())
    federation = fedstill.federate(
        fedstill.load_dataset("fashion-mini", image_size=16), clients=6, alpha=0.5, fraction=0.05, seed=4
    )
    for k in draw_attackers(federation.sizes, 2, seed=4):
        w, forged = learnt[k]["model"].numpy(), sent[k]["model"]
        np.testing.assert_array_equal(forged[net.trainable :], w[net.trainable :], "statistics are left alone")
        if kind != "noise":
            expected = w_t - (w - w_t) if kind == "sign-flip" else w_t + np.float32(scale) * (w - w_t)
            np.testing.assert_array_equal(forged[: net.trainable], expected[: net.trainable])
            continue
        rng = seeds.torch_rng(4, "attack", 1, k)
        for name, layer in net.unflatten(learnt[k]["model"]).items():
            if name in dict(net.module.named_parameters()):
                noise = torch.randn(layer.shape, generator=rng).numpy() * scale * np.std(layer.numpy())
                np.testing.assert_allclose(net.unflatten(forged)[name], layer.numpy() + noise, rtol=1e-4, atol=1e-6)


def test_the_noise_is_another_in_every_round_and_for_every_client(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossings, settings = record_rounds(monkeypatch), QUICK | {"rounds": 2, "lr": 1e-30}
    run_small(**settings, attack="noise", attackers=2)
    attackers = prepared(attack="noise", attackers=2).attack.clients
    noise = [
        (up["model"] - crossing.down["model"]) / crossing.down["model"][:2048].std()
        for crossing in crossings
        for k, up in crossing.up.items()
        if k in attackers
    ]
    assert len(noise) == 4
    correlation = np.corrcoef(torch.stack(noise)[:, :2048])  # the first layer
    np.testing.assert_allclose(correlation, np.eye(4), atol=0.15)
    for drawn in noise[:2]:
        assert float(drawn[:2048].std()) == pytest.approx(1, abs=0.06)


def test_the_attackers_are_the_same_for_every_method_and_more_include_fewer() -> None:
    first = prepared(attack="noise", attackers=3, seed=7).attack
    for method in ("fedprox", "scaffold", "fedgkd+t1", "fedavg+median"):
        assert prepared(method, attack="noise", attackers=3, seed=7).attack == first
    assert prepared("feddistill", attack="label-flip", attackers=3, seed=7).attack.clients == first.clients
    assert prepared(attack="noise", attackers=2, seed=7).attack.clients < first.clients
    drawn = {prepared(attack="noise", attackers=3, seed=seed).attack.clients for seed in range(5)}
    assert len(drawn) > 1, "the seed decides"


def test_only_clients_with_data_attack() -> None:
    sizes = np.array([0, 5, 0, 7, 1, 0])
    assert draw_attackers(sizes, 3, seed=0) == {1, 3, 4}
    assert all(draw_attackers(sizes, 1, seed=seed) <= {1, 3, 4} for seed in range(9))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirror-flip", "noise", "count", "min-max", "adaptive"])
def test_the_same_bits_on_any_engine_and_after_an_interruption(
    run_small: RunSmall, tmp_path: Path, kind: AttackKind
) -> None:
    settings = QUICK | {"rounds": 2, "attack": kind, "attackers": 2, "participation": 0.5}
    inline = run_small("fedgkd", **settings)
    run_small("fedgkd", **settings | {"rounds": 1}, out=tmp_path / "run", engine="process", workers=2)
    resumed = fedstill.resume(tmp_path / "run", rounds=2)
    assert torch.equal(weights(inline), weights(resumed))
    assert numbers(inline) == numbers(resumed)
    assert f"{kind} by clients" in (tmp_path / "run" / "log.txt").read_text()


def test_attackers_attack_inside_their_regions(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    crossings, settings = record_rounds(monkeypatch), QUICK | {"regions": 2}
    run_small(**settings)
    run_small(**settings, attack="sign-flip", attackers=2)
    attackers = prepared(**settings, attack="sign-flip", attackers=2).attack.clients
    for plain, attacked in zip(crossings[:2], crossings[2:], strict=True):
        assert plain.cohort == attacked.cohort
        for k, up in plain.up.items():
            assert torch.equal(up["model"], attacked.up[k]["model"]) == (k not in attackers)


def attacked(
    run_small: RunSmall, patch: pytest.MonkeyPatch, kind: str, method: str = "fedavg", **settings: Any
) -> tuple[Round, list[Uplink], frozenset[int]]:
    """What crossed in one round, what the method got of it, and who attacked."""
    crossings, given = record_rounds(patch), QUICK | settings
    received: list[Uplink] = []
    aggregate = type(registry.make(method)).aggregate

    def noted(self: Method, server: Server, uplinks: Iterator[Uplink]) -> None:
        received.extend(uplinks)
        aggregate(self, server, iter(received))

    patch.setattr(type(registry.make(method)), "aggregate", noted)
    run_small(method, **given, attack=kind, attackers=2)
    return crossings[0], received, prepared(attack="noise", attackers=2).attack.clients


def test_a_boosted_sign_flip_is_a_negative_scale(run_small: RunSmall) -> None:
    flips = [
        run_small(**QUICK, attack=kind, attackers=2, attack_scale=scale)
        for kind, scale in (("sign-flip", 4.0), ("scale", -4.0))
    ]
    assert torch.equal(weights(flips[0]), weights(flips[1]))


def test_count_claims_what_nobody_has(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    crossing, _, attackers = attacked(run_small, monkeypatch, "count")
    for k, claimed in crossing.samples.items():
        assert (claimed == 10**8) == (k in attackers)


def test_buffers_and_extra_send_the_number_that_is_set(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        batchnorm: dict[str, Any] = {"model": normed, "model_options": {}, "attack_scale": 1e12}
        crossing, _, attackers = attacked(run_small, patch, "buffers", **batchnorm)
    trainable = FlatNet(normed()).trainable
    for k, up in crossing.up.items():
        assert bool((up["model"][trainable:] == 1e12).all()) == (k in attackers)
        assert float(up["model"][:trainable].abs().max()) < 10
    crossing, _, attackers = attacked(run_small, monkeypatch, "extra", "scaffold", attack_scale=1e3)
    for k, up in crossing.up.items():
        assert bool((up["c_change"] == 1e3).all()) == (k in attackers)


@pytest.mark.parametrize(("kind", "scale"), [("alie", 1.5), ("ipm", 2.0), ("min-max", 1.0)])
def test_colluding_attackers_send_what_their_formulas_say(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, kind: str, scale: float
) -> None:
    crossing, received, attackers = attacked(run_small, monkeypatch, kind, attack_scale=scale)
    assert [up.client for up in received] == crossing.cohort
    w_t = crossing.down["model"].double().numpy()
    learnt = {k: up["model"].double().numpy() for k, up in crossing.up.items()}
    honest = np.array([w for k, w in learnt.items() if k not in attackers])
    sent = [up["model"].double().numpy() for up in received if up.client in attackers]
    assert len(sent) == 2
    np.testing.assert_array_equal(sent[0], sent[1])
    for up in received:
        if up.client not in attackers:
            np.testing.assert_array_equal(up["model"].double().numpy(), learnt[up.client])
    mean = honest.mean(0)
    if kind == "alie":
        np.testing.assert_allclose(sent[0], mean - 1.5 * honest.std(0), rtol=1e-5, atol=1e-7)
    elif kind == "ipm":
        np.testing.assert_allclose(sent[0], w_t - 2 * (mean - w_t), rtol=1e-5, atol=1e-7)
    else:
        widest = max(np.linalg.norm(a - b) for a in honest for b in honest)
        assert max(np.linalg.norm(honest - sent[0], axis=1)) == pytest.approx(widest, rel=1e-4)
        back, update = sent[0] - mean, mean - w_t
        assert back @ update / np.linalg.norm(back) / np.linalg.norm(update) == pytest.approx(-1, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["", "+norm-clip", "+multi-krum", "+centered-clip"])
def test_who_knows_the_rule_does_at_least_as_much_harm(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Of one round: the step along the honest clients' mean update is the smallest with `adaptive`."""
    found = {}
    for kind, scale in (("adaptive", 1.0), ("alie", 1.5), ("ipm", 1.0), ("min-max", 1.0)):
        with monkeypatch.context() as patch:
            crossings = record_rounds(patch)
            result = run_small(f"fedavg{rule}", **QUICK, attack=kind, attackers=2, attack_scale=scale)
        attackers = prepared(attack=kind, attackers=2, attack_scale=scale).attack.clients
        w_t = crossings[0].down["model"].double()
        honest = [up["model"].double() for k, up in uploads(crossings).items() if k not in attackers]
        found[kind] = float((weights(result).double() - w_t) @ (torch.stack(honest).mean(0) - w_t))
    assert found["adaptive"] <= min(found.values()) + 1e-6


def test_attackers_without_anybody_to_learn_from_send_what_they_learnt(run_small: RunSmall) -> None:
    plain, attacked = run_small(**QUICK), run_small(**QUICK, attack="alie", attackers=6)
    assert torch.equal(weights(plain), weights(attacked))


def test_label_flipping_costs_accuracy(run_small: RunSmall) -> None:
    settings = QUICK | {"rounds": 3, "alpha": 10.0, "fraction": 0.2}
    plain, attacked = run_small(**settings), run_small(**settings, attack="label-flip", attackers=4)
    assert attacked.summary["final_accuracy"] < plain.summary["final_accuracy"] - 0.1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attack": "noise"}, "attack = 'noise': say how many"),
        ({"attackers": 2}, "attackers = 2: say what they do"),
        ({"attack": "nois", "attackers": 1}, "attack = 'nois': should be"),
        ({"attack": "noise", "attackers": 7}, "attackers = 7: only 6 clients have data"),
        ({"attack": "noise", "attackers": -1}, "attackers = -1"),
        ({"attack": "label-flip", "attackers": 1, "attack_class": 10}, "attack_class = 10: the classes are 0 to 9"),
        ({"attack": "label-flip", "attackers": 1, "attack_class": -1}, "attack_class = -1"),
        ({"attack": "noise", "attackers": 1, "attack_scale": 0.0}, r"attack_scale = 0\.0"),
        ({"attack": "sign-flip", "attackers": 1, "attack_scale": -2.0}, r"attack_scale = -2\.0: .* use attack=scale"),
        ({"attack": "buffers", "attackers": 1}, "this network has none"),
        ({"attack": "extra", "attackers": 1}, "beside the model, and this is nothing"),
        ({"attack": "alie", "attackers": 1, "method": "feddistill"}, "this method sends none"),
        ({"attack": "noise", "attackers": 1, "attack_scale": float("nan")}, "attack_scale = nan"),
        ({"attack": "scale", "attackers": 1}, "changes nothing"),
        ({"attack": "noise", "attackers": 1, "method": "feddistill"}, "this method sends none"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(fedstill.SettingError, match=reason):
        prepared(**settings)
