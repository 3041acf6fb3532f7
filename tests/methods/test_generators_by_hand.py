"""What clients and servers of FedGen and FedFTG compute in real rounds, against loops written from the equations.

Each test runs the method with a tap on the wire and works out, from what crossed before, what should have crossed
next. Only random draws are shared: their streams are named by purpose, round and client.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.distill.generators import ConditionalGenerator, FeatureGenerator
from fedstill.methods.base import Server, Uplink
from fedstill.methods.fedftg import FedFTG
from fedstill.models import Classifier
from support.play import (
    CLASSES,
    SHAPE,
    WIDTH,
    assert_moved_alike,
    assert_near,
    at_server,
    averaged,
    kl,
    label_shares,
    loaded,
    locally,
    nothing,
    pairwise_diversity,
    play,
    stream,
)
from support.wiretap import (
    assert_same_network,
    descend,
    network,
)

Z = 4
SMALL_FEDGEN: dict[str, Any] = {"hidden": 16, "z_dim": 5, "generator_batch": 6}


def feature_generator(vector: Tensor) -> FeatureGenerator:
    module: FeatureGenerator = loaded(FeatureGenerator(CLASSES, WIDTH, 16, 5), vector)
    return module


def test_fedgens_clients_learn_from_generated_features_from_the_second_round() -> None:
    """Row 7: CE + a_t CE(h(G(y~)), y~) + b_t KL(softmax(h(G(y))) || p(x)), a_t = a 0.98^t; round 1 is plain CE."""
    hyper = {"hyper": {"alpha": 2.0, "beta": 3.0}}
    run = play("fedgen", rounds=3, **SMALL_FEDGEN, generator_steps=5, generator_lr=0.01, **hyper)
    for crossed in run.rounds:
        for k, up in crossed.up.items():
            fade, rng = 0.98 ** (crossed.number - 1), stream("generated", crossed.number, k)
            frozen = feature_generator(crossed.down["feature_generator"]).eval()

            def augmented(
                net: Classifier,
                x: Tensor,
                y: Tensor,
                fade: float = fade,
                rng: torch.Generator = rng,
                frozen: FeatureGenerator = frozen,
            ) -> Tensor:
                drawn = torch.randint(0, CLASSES, (6,), generator=rng)
                made = frozen(torch.rand(6, 5, generator=rng), drawn).detach()
                by_label = -net.head(made).log_softmax(1)[torch.arange(6), drawn].mean()
                teacher = net.head(frozen(torch.rand(len(y), 5, generator=rng), y)).softmax(1).detach()
                both: Tensor = fade * (2 * by_label + 3 * kl(teacher, net(x)))
                return both

            expected = locally(run, k, crossed, nothing if crossed.number == 1 else augmented)
            assert_same_network(up["model"], expected)
            assert up["counts"].tolist() == run.counts(k)
    for number, crossed in enumerate(run.rounds, 1):
        torch.testing.assert_close(run.model_after(number), averaged(crossed), rtol=1e-5, atol=1e-7)


def test_fedgens_generator_is_trained_on_the_clients_heads() -> None:
    """Row 7: diversity + sum_k weight_k(y) CE(h_k(G(y)), y), Adam with decay 1e-2, its rate falling by 0.98 a round."""
    run = play("fedgen", rounds=3, **SMALL_FEDGEN, generator_steps=4, generator_lr=0.01)
    generator = feature_generator(run.rounds[0].down["feature_generator"])
    adam = torch.optim.Adam(generator.parameters(), weight_decay=1e-2)
    for crossed, following in zip(run.rounds[:-1], run.rounds[1:], strict=True):
        adam.param_groups[0]["lr"] = 0.01 * 0.98 ** (crossed.number - 1)
        rng, shares = at_server("generator", crossed.number), label_shares(run, crossed.up)
        heads = [network(up["model"]).head for up in crossed.up.values()]
        for _ in range(4):
            y = torch.randint(0, CLASSES, (6,), generator=rng)
            z = torch.rand(6, 5, generator=rng)
            made = generator(z, y)
            loss = pairwise_diversity(z, made)
            for head, share in zip(heads, shares, strict=True):
                for i in range(6):
                    loss = loss - share[y[i]] * head(made[i : i + 1]).log_softmax(1)[0, y[i]] / 6
            adam.zero_grad()
            loss.backward()
            adam.step()
        for name, tensor in feature_generator(following.down["feature_generator"]).state_dict().items():
            torch.testing.assert_close(tensor, generator.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_fedftgs_generator_seeks_and_its_student_mends_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 9: a generator step for each client on -mean(w|s - t|) + w CE(t, y) + diversity / K, then student steps.

    The student's are on the cross-entropy to sum_k w_k(y) softmax(t_k); labels are drawn as the clients hold them.
    """
    kept: list[Tensor] = []
    improve = FedFTG.improve

    def noting(self: FedFTG, server: Server, uplinks: list[Uplink]) -> None:
        kept.append(server.state["image generator"])
        improve(self, server, uplinks)
        kept.append(server.state["image generator"])

    monkeypatch.setattr(FedFTG, "improve", noting)
    size, hyper = 6, {"z_dim": Z, "generator_width": 8, "iterations": 2, "student_steps": 3, "generator_lr": 0.002}
    run = play("fedftg", rounds=1, **hyper, server_batch=size, lambda_cls=0.05, lambda_dis=0.3, lr=0.2)
    (crossed,) = run.rounds
    teachers = [network(up["model"]).eval() for up in crossed.up.values()]
    shares, rng = label_shares(run, crossed.up), at_server("image generator", 1)
    owned = torch.tensor([run.counts(k) for k in crossed.up]).sum(0).float()
    before, found, generator = (loaded(ConditionalGenerator(SHAPE, CLASSES, Z, 8), v) for v in (*kept, kept[0]))
    adam, student = torch.optim.Adam(generator.parameters(), lr=0.002), network(averaged(crossed))
    for _ in range(2):
        y = torch.multinomial(owned, size, replacement=True, generator=rng)
        z = torch.randn(size, Z, generator=rng)
        for share, teacher in zip(shares, teachers, strict=True):
            made = generator(z, y)
            loss = 0.3 * pairwise_diversity(z, made) / len(teachers)
            for i in range(size):
                s, t = student(made[i : i + 1])[0], teacher(made[i : i + 1])[0]
                differ, known = (s - t.detach()).abs().mean(), -t.log_softmax(0)[y[i]]
                loss = loss + share[y[i]] * (0.05 * known - differ) / size
            adam.zero_grad()
            loss.backward(inputs=list(generator.parameters()))
            adam.step()
        made = generator(z, y).detach()
        soft = torch.zeros(size, CLASSES)
        for share, teacher in zip(shares, teachers, strict=True):
            for i in range(size):
                soft[i] += share[y[i]] * teacher(made[i : i + 1])[0].softmax(0).detach()
        for _ in range(3):
            descend(student, -(soft * student(made).log_softmax(1)).mean(), lr=0.1)
    assert_near(*(g(z, y).detach() for g in (found, generator, before)))
    assert_moved_alike(network(run.model_after(1)), student, network(averaged(crossed)))
    for k, up in crossed.up.items():
        assert up["counts"].tolist() == run.counts(k)
