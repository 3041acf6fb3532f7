"""What clients and servers of the server-side methods compute in real rounds, against loops written from the equations.

Each test runs the method with a tap on the wire and works out, from what crossed before, what should have crossed
next. Only random draws are shared: their streams are named by purpose, round and client.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.building.setup import Setup
from fedstill.core import seeds
from fedstill.core.weights import FlatNet
from fedstill.data.augment import rotate_by
from fedstill.distill.generators import ConditionalGenerator, FeatureGenerator, TransposedGenerator
from fedstill.distill.stage import match_probabilities
from fedstill.methods import registry
from fedstill.methods.base import Server, Uplink
from fedstill.methods.dafkd import DaFKD
from fedstill.methods.fedbe import FedBE
from fedstill.methods.fedftg import FedFTG
from fedstill.models import Classifier
from fedstill.running.result import Result
from fedstill.train.loop import Loss
from support.byhand import Uplinks, tiny_server
from support.recorder import Round
from support.wiretap import (
    BATCH,
    LR,
    Extra,
    Floats,
    assert_same_network,
    descend,
    exact,
    network,
    normalised,
    setup_of,
    softmax,
    taped,
)

POOL: dict[str, Any] = {"pool": 0.2, "proxy": "pool"}
CLASSES, WIDTH, SHAPE = 10, 84, (1, 16, 16)  # of the small run's data and of its network's features


def stream(purpose: str, *where: int) -> torch.Generator:
    return seeds.torch_rng(0, purpose, *where)


def at_server(purpose: str, round_: int) -> torch.Generator:
    return stream(f"server: {purpose}", round_)


@dataclass(frozen=True)
class Play:
    """A real run, and what its clients and its server hold."""

    setup: Setup
    result: Result
    rounds: list[Round]
    targets: list[Tensor] = field(default_factory=list)

    @property
    def lr(self) -> float:
        return self.setup.task.local.lr

    def held_by(self, k: int) -> tuple[Tensor, Tensor]:
        index, train = torch.from_numpy(self.setup.federation.train(k)), self.setup.federation.dataset.train
        return normalised(train.x[index]), train.y[index]

    def proxy(self) -> Tensor:
        return normalised(self.setup.federation.dataset.train.x[torch.from_numpy(self.setup.federation.pool_index)])

    def counts(self, k: int) -> list[int]:
        y = self.held_by(k)[1].tolist()
        return [y.count(c) for c in range(CLASSES)]

    def model_after(self, round_: int) -> Tensor:
        """The global model that a round ends with."""
        if round_ < len(self.rounds):
            return self.rounds[round_].down["model"]
        return FlatNet(copy.deepcopy(self.result.model)).read()


def play(method: str, *, rounds: int, **settings: Any) -> Play:
    result, tape = taped(method, rounds=rounds, **settings)
    return Play(setup_of(method, **settings), result, tape)


def noted_targets(patch: pytest.MonkeyPatch, method: str) -> list[Tensor]:
    """From now on, the soft targets that a method's server is about to match."""
    seen: list[Tensor] = []

    def noting(targets: Tensor, *more: Any) -> Loss:
        seen.append(targets)
        return match_probabilities(targets, *more)

    patch.setattr(f"fedstill.methods.{method}.match_probabilities", noting)
    return seen


# --- the common pieces ----------------------------------------------------------------------------------------------


def batches_of(k: int, round_: int, n: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.randperm(n, generator=stream("batches", round_, k)).split(BATCH)
    return parts


def locally(run: Play, k: int, crossed: Round, extra: Extra) -> Classifier:
    """A client's round on its cross-entropy and something more."""
    net, (x, y) = network(crossed.down["model"]), run.held_by(k)
    for ids in batches_of(k, crossed.number, len(y)):
        descend(net, F.cross_entropy(net(x[ids]), y[ids]) + extra(net, x[ids], y[ids]), run.lr)
    return net


def nothing(_net: Classifier, _x: Tensor, _y: Tensor) -> Tensor:
    return torch.zeros(())


def averaged(crossed: Round, part: str = "model", *, uniform: bool = False) -> Tensor:
    """The mean of what the clients of a round sent, by their sample counts or not."""
    shares = [1 if uniform else crossed.samples[k] for k in crossed.up]
    parts = [crossed.up[k][part].double().numpy() for k in crossed.up]
    total = np.zeros_like(parts[0])
    for share, vector in zip(shares, parts, strict=True):
        total += share * vector
    return torch.from_numpy(total / sum(shares)).float()


def kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p || softmax(logits)), mean over the batch."""
    return (p * (p.clamp(min=1e-30).log() - logits.log_softmax(1))).sum(1).mean()


def probabilities(net: Classifier, x: Tensor) -> Tensor:
    return torch.from_numpy(softmax(exact(net, x)[0])).float()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def assert_moved_alike(actual: nn.Module, expected: nn.Module, start: nn.Module, within: float = 0.03) -> None:
    """Two networks have come from the start to the same place.

    Adam makes a whole step of a vanishing gradient's rounding, so single weights may differ, but not all together.
    """
    assert_near(flat(actual), flat(expected), flat(start), within)


def assert_near(actual: Tensor, expected: Tensor, start: Tensor, within: float = 0.03) -> None:
    """What is found is near what is expected, as seen from the start."""
    assert (actual - expected).norm() <= within * (expected - start).norm()


StudentLoss = Callable[[Classifier, Tensor], Tensor]
"""A loss of the student and the places of a batch's samples."""


def distilled(
    start: Tensor,
    loss: StudentLoss,
    batches: Iterable[Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Classifier:
    """A student after these batches."""
    net = network(start)
    stepper = optimizer(net.parameters())
    for ids in batches:
        stepper.zero_grad()
        loss(net, ids).backward()
        stepper.step()
    return net


def epochs_of(n: int, size: int, epochs: int, order: torch.Generator) -> list[Tensor]:
    return [ids for _ in range(epochs) for ids in torch.randperm(n, generator=order).split(size)]


def pairwise_diversity(z: Tensor, made: Tensor) -> Tensor:
    """exp(-mean_ij mean|z_i - z_j|^2 mean|G_i - G_j|), by a double loop."""
    n, total = len(z), torch.zeros(())
    for i in range(n):
        for j in range(n):
            total = total + ((z[i] - z[j]) ** 2).mean() * (made[i] - made[j]).abs().mean()
    return torch.exp(-total / n**2)


def label_shares(run: Play, clients: Iterable[int]) -> Tensor:
    """n_k^y / sum_k n_k^y (K, C); equal shares of a class that none has."""
    counts = np.array([run.counts(k) for k in clients], float)
    shares = np.full_like(counts, 1 / len(counts))
    for c in range(CLASSES):
        if counts[:, c].sum():
            shares[:, c] = counts[:, c] / counts[:, c].sum()
    return torch.from_numpy(shares).float()


# --- defaults -------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "dafkd": {"uniform": True, "variant": "full", "private": False, "conditional": False, "z_dim": 100}
    | {"generator_lr": 1e-3, "server_lr": 1e-3, "batches": 40, "server_batch": 32, "server_epochs": 5},
    "fedhyb": {"uniform": False, "a": 1.0, "eta": 1.0, "nu": 1.0, "M": 2, "min_width": 0.8, "rotation": 15.0}
    | {"beta_per_sample": False, "server_epochs": 1, "server_lr": 1e-3, "server_batch": 64, "variant": "full"},
    "feddf": {"uniform": False, "server_lr": 1e-3, "server_batch": 128},
    "fedgen": {"alpha": 10.0, "beta": 10.0, "decay": 0.98, "hidden": 256, "z_dim": 32, "generator_lr": 3e-4}
    | {"generator_decay": 1e-2, "generator_steps": 50, "generator_batch": 32},
    "fedftg": {"iterations": 10, "student_steps": 5, "lambda_cls": 1.0, "lambda_dis": 1.0, "z_dim": 100}
    | {"generator_lr": 0.01, "server_lr": 0.1},
    "fedbe": {"samples": 10, "spread": 0.1, "sharpen": 0.5, "clients_teach": True, "server_epochs": 20}
    | {"server_lr": 1e-3, "server_batch": 128},
    "fedmd": {"weight": 0.1, "average_weights": True},
    "fedhkd": {"lambda_": 0.05, "gamma": 0.05, "T": 0.5, "noise": 0.0},
    "fedavg+ccvr": {"virtual": 200},
    "creff": {"features": 100, "match_steps": 100, "match_lr": 0.1, "retrain_epochs": 300, "retrain_lr": 0.01}
    | {"draws": 10, "draw_size": 32},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_the_published_ones(name: str) -> None:
    """The tables of hyper-parameters; FedGen's are those for MNIST."""
    made = registry.make(name)
    assert {field: getattr(made, field) for field in DEFAULTS[name]} == DEFAULTS[name]


# --- DaFKD ----------------------------------------------------------------------------------------------------------

Z = 4
SMALL_DAFKD: dict[str, Any] = {"z_dim": Z, "batches": 3, "server_batch": 8, "server_epochs": 1, "server_lr": 0.01}
SMALL_DAFKD |= {"fraction": 0.06, "lr": 0.2}  # fast enough for discriminators that differ
HEAD = WIDTH + 1  # numbers in the discriminator's own layer


@cache
def dafkd(*settings: tuple[str, Any]) -> tuple[Play, DaFKD]:
    """Two rounds with some settings; several tests look at the same run."""
    with pytest.MonkeyPatch.context() as patch:
        targets = noted_targets(patch, "dafkd")
        run = play("dafkd", rounds=2, **SMALL_DAFKD | dict(settings))
    assert isinstance(run.setup.method, DaFKD)
    assert len(targets) == (run.setup.method.variant != "no-distill")  # the first round only averages
    run.targets.extend(targets)
    return run, run.setup.method


def loaded(module: nn.Module, vector: Tensor) -> Any:
    """A network of the library with these weights, in training mode."""
    module.load_state_dict(FlatNet(copy.deepcopy(module)).unflatten(vector))
    return module.train()


def image_generator(vector: Tensor, method: DaFKD) -> nn.Module:
    made = ConditionalGenerator(SHAPE, CLASSES, Z) if method.conditional else TransposedGenerator(SHAPE, Z)
    module: nn.Module = loaded(made, vector)
    return module


def fakes(run: Play, generator: nn.Module, count: int, noise: torch.Generator) -> Tensor:
    """G(z), standardised as the data are; of random labels if the generator is told one."""
    z = torch.randn(count, Z, generator=noise)
    if isinstance(generator, ConditionalGenerator):
        told: Tensor = generator(z, torch.randint(0, CLASSES, (count,), generator=noise))
        return told
    dataset = run.setup.federation.dataset
    made: Tensor = (generator(z) - dataset.mean[0]) / dataset.std[0]
    return made


class Judge(nn.Module):
    """D: one linear layer and a sigmoid on the features of a trunk, the classifier's or the judge's own."""

    def __init__(self, vector: Tensor, classifier: Classifier) -> None:
        super().__init__()
        self.head = nn.Parameter(vector[-HEAD:].clone())
        self.own_trunk = network(vector[:-HEAD]) if len(vector) > HEAD else None
        self.shared = [classifier]  # in a list: not one of the judge's own parts

    def forward(self, x: Tensor) -> Tensor:
        features = (self.own_trunk or self.shared[0]).features(x)
        return 1 / (1 + torch.exp(-(features @ self.head[:-1] + self.head[-1])))


def dafkd_client(run: Play, k: int, crossed: Round, head: Tensor) -> tuple[Classifier, nn.Module, Judge]:
    """Algorithm 1, lines 16 to 25: joint steps on Eq. 9, each followed by a step of the generator up Eq. 3."""
    assert isinstance(run.setup.method, DaFKD)
    net, (x, y) = network(crossed.down["model"]), run.held_by(k)
    generator, judge = image_generator(crossed.down["generator"], run.setup.method), Judge(head, net)
    adam, noise = torch.optim.Adam(generator.parameters(), 1e-3), stream("adversarial noise", crossed.number, k)
    for ids in batches_of(k, crossed.number, len(y)):
        with torch.no_grad():
            negatives = fakes(run, generator, len(ids), noise)
        real, fake = judge(x[ids]), judge(negatives)
        l_adv = -(real.log().sum() + (1 - fake).log().sum()) / (2 * len(ids))  # Eq. 2
        trained = [*net.parameters(), *judge.parameters()]
        grads = torch.autograd.grad(F.cross_entropy(net(x[ids]), y[ids]) + l_adv, trained, allow_unused=True)
        with torch.no_grad():
            for p, grad in zip(trained, grads, strict=True):
                p.sub_(run.lr * grad if grad is not None else 0)
        adam.zero_grad()
        l_g = -judge(fakes(run, generator, max(2, len(ids)), noise)).log().mean()  # Eq. 3, non-saturating
        l_g.backward(inputs=list(generator.parameters()))
        adam.step()
    return net, generator, judge


def first_judge(run: Play, method: DaFKD) -> Tensor:
    """The discriminator that every client starts its first round with."""
    return method.discriminator(run.setup.task).initial()


@pytest.mark.parametrize("setting", [("variant", "full"), ("variant", "no-sharing"), ("conditional", True)], ids=str)
def test_dafkds_clients_train_on_the_joint_loss_and_their_generators_ascend(setting: tuple[str, Any]) -> None:
    """Eq. 2, 3 and 9. In its second round a client has its own head again, on the trunk that the server sent."""
    # Where the generator has no bound but its batch's statistics, each step makes more of rounding: there, more slowly.
    run, method = dafkd(setting, ("lr", 0.02)) if setting[0] == "conditional" else dafkd(setting)
    within = 0.03 if method.conditional else 0.005
    judges: dict[int, Tensor] = {}
    again = set(run.rounds[0].up) & set(run.rounds[1].up)
    assert again
    for crossed in run.rounds:
        for k, up in crossed.up.items():
            if k in again:
                judge_then = judges.get(k, first_judge(run, method))
                net, generator, judge = dafkd_client(run, k, crossed, judge_then)
                assert_moved_alike(network(up["model"]), net, network(crossed.down["model"]), within)
                assert_moved_alike(Judge(up["discriminator"], net), judge, Judge(judge_then, net), within)
                sent, start = (image_generator(v, method) for v in (up["generator"], crossed.down["generator"]))
                # By what they make: of a bias before BatchNorm, which changes nothing, Adam's steps are rounding.
                with torch.no_grad():
                    actual, expected, before = (
                        fakes(run, g, 64, torch.Generator().manual_seed(0)) for g in (sent, generator, start)
                    )
                assert_near(actual, expected, before)
            judges[k] = up["discriminator"]


def test_without_sharing_dafkds_classifier_learns_from_the_cross_entropy_alone() -> None:
    """Sec. 4.2 (no-sharing): a separate discriminator leaves the classifier of Eq. 1 alone."""
    run, _ = dafkd(("variant", "no-sharing"))
    for crossed in run.rounds:
        for k, up in crossed.up.items():
            assert_same_network(up["model"], locally(run, k, crossed, nothing))


def test_after_adv_rounds_dafkds_clients_train_on_the_cross_entropy_and_keep_their_adversaries() -> None:
    """The option to freeze generator and discriminators after the first rounds."""
    run, method = dafkd(("adv_rounds", 1))
    first, second = run.rounds
    for k, up in second.up.items():
        assert_same_network(up["model"], locally(run, k, second, nothing))
        sent, kept = (image_generator(v, method) for v in (up["generator"], second.down["generator"]))
        assert torch.equal(flat(sent), flat(kept))
        judge = first.up[k]["discriminator"] if k in first.up else first_judge(run, method)
        assert torch.equal(up["discriminator"], judge)


def pseudo_set(run: Play, method: DaFKD, generator: Tensor, round_: int) -> Tensor:
    module, noise = image_generator(generator, method), stream("pseudo set", round_)
    with torch.no_grad():
        return torch.cat([fakes(run, module, 8, noise) for _ in range(3)])


DAFKD_SERVERS: list[tuple[str, Any]] = [
    ("variant", "full"),
    ("uniform", False),
    ("conditional", True),
    ("variant", "no-sharing"),
    ("variant", "no-correlation"),
    ("variant", "no-distill"),
    ("private", True),
    ("logit_T", 20.0),
]


@pytest.mark.parametrize("setting", DAFKD_SERVERS, ids=str)
def test_dafkds_server_averages_uniformly_and_distils_by_the_correlations(setting: tuple[str, Any]) -> None:
    """Eq. 4, 6, 7 and 8; the first round only averages. In the private variant alpha_k softmax(w_k) is what crosses.

    With logit_T, logits are averaged, and matched at that temperature.
    """
    run, method = dafkd(setting)
    first, second = run.rounds
    new_g = [averaged(crossed, "generator", uniform=True) for crossed in run.rounds]
    torch.testing.assert_close(run.model_after(1), averaged(first, uniform=method.uniform), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(second.down["generator"], new_g[0], rtol=1e-5, atol=1e-7)
    start = averaged(second, uniform=method.uniform)
    if method.variant == "no-distill":
        torch.testing.assert_close(run.model_after(2), start, rtol=1e-5, atol=1e-7)
        return
    x = pseudo_set(run, method, second.down["generator"] if method.private else new_g[1], 2)
    weighted, total = torch.zeros(len(x), CLASSES), torch.zeros(len(x), 1)
    for k, up in second.up.items():
        net = network(up["model"])
        alpha = torch.ones(len(x), 1)
        if method.variant != "no-correlation":
            judge = judge_of(run, method, k) if method.private else Judge(up["discriminator"], net)
            alpha = judge(x).detach().unsqueeze(1)
        said = torch.from_numpy(exact(net, x)[0]).float() if method.logit_T else probabilities(net, x)
        weighted += alpha * said
        total += alpha
        if method.private:
            assert "discriminator" not in up
            torch.testing.assert_close(up["predictions"], alpha * said, rtol=1e-2, atol=1e-4)
    t = method.logit_T or 1.0
    targets = (weighted / total / t).softmax(1) if method.logit_T else weighted / total
    torch.testing.assert_close(run.targets[0], targets, rtol=1e-4, atol=1e-4 if method.private else 1e-6)
    expected = distilled(
        start,
        lambda net, ids: t**2 * kl(targets[ids], net(x[ids]) / t),
        epochs_of(len(x), 8, 1, at_server("distillation", 2)),
        partial(torch.optim.Adam, lr=0.01),
    )
    # By their outputs: of a gradient that is all rounding, Adam makes a whole step, another one on each processor.
    found, wanted, before = (
        torch.from_numpy(exact(net, x)[0]) for net in (network(run.model_after(2)), expected, network(start))
    )
    assert_near(found, wanted, before, 0.1 if method.logit_T else 0.03)  # at T = 20 gradients are nearly nothing else


def judge_of(run: Play, method: DaFKD, k: int) -> Judge:
    """A client's discriminator after its second round, which did not cross: worked out from the start."""
    first, second = run.rounds
    head = first_judge(run, method)
    if k in first.up:
        head = dafkd_client(run, k, first, head)[2].head.detach()
    return dafkd_client(run, k, second, head)[2]


# --- FedHyb ---------------------------------------------------------------------------------------------------------


def narrow(net: nn.Module, x: Tensor, width: float) -> Tensor:
    """Logits of the sub-network: the first floor(width c + 1/2) outputs of every layer but the last."""
    w = dict(net.named_parameters())
    a, b, c, d = (max(1, math.floor(width * n + 0.5)) for n in (6, 16, 120, 84))
    h = F.max_pool2d(F.relu(F.conv2d(x, w["body.0.weight"][:a], w["body.0.bias"][:a])), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, w["body.3.weight"][:b, :a], w["body.3.bias"][:b])), 2).flatten(1)
    h = F.relu(h @ w["body.7.weight"][:c, :b].T + w["body.7.bias"][:c])
    h = F.relu(h @ w["body.9.weight"][:d, :c].T + w["body.9.bias"][:d])
    return h @ w["head.weight"][:, :d].T + w["head.bias"]


def transformed(x: Tensor, rng: torch.Generator) -> Tensor:
    """R_m: down to 16, 14 or 12 pixels and back, then each image turned by up to 15 degrees."""
    side = (16, 14, 12)[int(torch.randint(3, (), generator=rng))]
    if side < 16:
        x = F.interpolate(F.interpolate(x, size=side, mode="bilinear"), size=16, mode="bilinear")
    return rotate_by(x, 30 * torch.rand(len(x), generator=rng) - 15)


FEDHYB_CLIENTS: list[dict[str, Any]] = [
    {"variant": "1"},
    {"variant": "2"},
    {"variant": "full", "M": 3},
    {"variant": "full", "beta_per_sample": True},
]


@pytest.mark.parametrize("settings", FEDHYB_CLIENTS, ids=str)
def test_fedhybs_clients_teach_their_sub_networks(settings: dict[str, Any]) -> None:
    """Eq. 3 to 5: CE + a sum_m beta_m KL_m, with no gradient through the full network's answer nor through beta."""
    run = play("fedhyb", rounds=1, **POOL, a=100.0, **settings)  # much, for gradients that stop to be seen
    for k, up in run.rounds[0].up.items():
        rng = stream("sub-networks", 1, k)

        def self_distillation(net: Classifier, x: Tensor, y: Tensor, rng: torch.Generator = rng) -> Tensor:
            taught_by = net(x).softmax(1).detach()
            total = torch.zeros(())
            for m in range(settings.get("M", 2)):
                width = 0.8 if m == 0 else 0.8 + 0.2 * float(torch.rand((), generator=rng))
                said = narrow(net, transformed(x, rng), width)
                each = (taught_by * (taught_by.log() - said.log_softmax(1))).sum(1)
                wrong = -said.log_softmax(1)[torch.arange(len(y)), y].detach()
                if settings["variant"] == "1":
                    beta = torch.ones(())
                elif settings.get("beta_per_sample"):
                    beta = torch.exp(-wrong) / (1 + torch.exp(-wrong))
                else:
                    beta = torch.exp(-wrong.mean()) / (1 + torch.exp(-wrong.mean()))  # Eq. 4
                total = total + (beta * each).mean()
            return 100.0 * total

        assert_same_network(up["model"], locally(run, k, run.rounds[0], self_distillation))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["1", "2", "3", "full"])
def test_fedhybs_server_matches_mean_predictions_and_mean_features(variant: str) -> None:
    """Eq. 2, then Eq. 6 to 8: eta KL(mean softmax || student) + nu MSE of features; ablations 1 and 2 stop at Eq. 2."""
    run = play("fedhyb", rounds=1, **POOL, variant=variant, eta=0.7, nu=2.5, server_lr=0.01, server_batch=50)
    (crossed,), x = run.rounds, run.proxy()
    if variant == "3":
        for k, up in crossed.up.items():
            assert_same_network(up["model"], locally(run, k, crossed, nothing))
    if variant in "12":
        torch.testing.assert_close(run.model_after(1), averaged(crossed), rtol=1e-5, atol=1e-7)
        return
    clients = [network(up["model"]) for up in crossed.up.values()]
    predictions = torch.stack([probabilities(net, x) for net in clients]).mean(0)
    features = torch.from_numpy(np.mean([exact(net, x)[1] for net in clients], axis=0)).float()

    def loss(net: Classifier, ids: Tensor) -> Tensor:
        away = (net.features(x[ids]) - features[ids]).square().sum() / (len(ids) * WIDTH)
        return 0.7 * kl(predictions[ids], net(x[ids])) + 2.5 * away

    order = epochs_of(len(x), 50, 1, at_server("hybrid distillation", 1))
    expected = distilled(averaged(crossed), loss, order, partial(torch.optim.Adam, lr=0.01))
    assert_moved_alike(network(run.model_after(1)), expected, network(averaged(crossed)))


# --- FedDF, FedBE ---------------------------------------------------------------------------------------------------


def test_feddfs_student_starts_from_the_average_and_descends_along_a_cosine() -> None:
    """Row 8: KL(softmax(mean logits) || student) from the weighted mean, Adam whose rate falls along a cosine."""
    steps, size = 5, 50
    run = play("feddf", rounds=1, **POOL, server_steps=steps, server_batch=size, server_lr=0.01)
    (crossed,), x = run.rounds, run.proxy()
    logits = np.mean([exact(network(up["model"]), x)[0] for up in crossed.up.values()], axis=0)
    targets = torch.from_numpy(softmax(logits)).float()
    order = at_server("distillation", 1)
    full = [
        ids for _ in range(steps) for ids in torch.randperm(len(x), generator=order).split(size) if len(ids) == size
    ]
    net, start = network(averaged(crossed)), network(averaged(crossed))
    adam = torch.optim.Adam(net.parameters())
    for t, ids in enumerate(full[:steps]):
        adam.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * t / steps)) / 2
        adam.zero_grad()
        kl(targets[ids], net(x[ids])).backward()
        adam.step()
    assert_moved_alike(network(run.model_after(1)), net, start)


def fedbe_gaussian(start: Floats, models: Floats, sizes: list[int], noise: Floats) -> list[Floats]:
    """Row 16, layer by layer: unit updates have a mean and a deviation; a draw of them is as long as updates are."""
    drawn = []
    for row in noise:
        model = start.copy()
        for a, b in itertools.pairwise(np.cumsum([0, *sizes]).tolist()):
            updates = [w[a:b] - start[a:b] for w in models]
            lengths = [math.sqrt(sum(float(u) ** 2 for u in update)) for update in updates]
            units = np.array([update / length for update, length in zip(updates, lengths, strict=True)])
            mean = sum(units) / len(units)
            deviation = np.sqrt(sum((u - mean) ** 2 for u in units) / len(units))
            model[a:b] += sum(lengths) / len(lengths) * (mean + 0.1 * deviation * row[a:b])
        drawn.append(model)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"distribution": "dirichlet"}, {"clients_teach": False}], ids=str)
def test_fedbes_teachers_average_to_sharpened_probabilities(settings: dict[str, Any]) -> None:
    """Row 16: the mean, the drawn models and the clients, p^2 / sum p^2, SGD with momentum 0.9 and decay 1e-5."""
    run = play("fedbe", rounds=1, **POOL, samples=2, server_epochs=2, server_lr=0.1, server_batch=50, **settings)
    (crossed,), x = run.rounds, run.proxy()
    models = np.stack([up["model"].double().numpy() for up in crossed.up.values()])
    mean, rng = averaged(crossed).double().numpy(), at_server("ensemble", 1)
    drawn: Sequence[Floats]
    if settings.get("distribution") == "dirichlet":
        raw = torch.empty(2, len(models), dtype=torch.float64).exponential_(generator=rng).numpy()
        drawn = [sum(r / row.sum() * w for r, w in zip(row, models, strict=True)) for row in raw]
    else:
        noise = torch.randn(2, len(mean), generator=rng, dtype=torch.float64).numpy()
        sizes = [p.numel() for p in network(crossed.down["model"]).parameters()]
        drawn = fedbe_gaussian(crossed.down["model"].double().numpy(), models, sizes, noise)
    teachers = [mean, *drawn, *(models if settings.get("clients_teach", True) else [])]
    p = np.mean([softmax(exact(network(torch.from_numpy(w).float()), x)[0]) for w in teachers], axis=0)
    sharp = torch.from_numpy(p**2 / (p**2).sum(1, keepdims=True)).float()
    expected = distilled(
        averaged(crossed),
        lambda net, ids: kl(sharp[ids], net(x[ids])),
        epochs_of(len(x), 50, 2, at_server("distillation", 1)),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-5),
    )
    assert_same_network(run.model_after(1), expected)


def test_fedbes_draws_have_the_moments_of_their_distributions(tmp_path: Path) -> None:
    """Gaussian: around the start plus a mean update, 0.1 times the deviation of updates; Dirichlet: Dir(1, ..., 1)."""
    server = tiny_server(tmp_path, [10, 30, 60])
    ups = Uplinks(server, [0, 1, 2])
    models, start = torch.from_numpy(ups.w), server.before.double().numpy()
    n, k = 20_000, 3
    drawn = torch.stack(FedBE(samples=n).draw(server, models)).numpy()
    flat = np.stack([np.zeros_like(start), np.ones_like(start)])  # no noise, and one deviation everywhere
    sizes = [p.numel() for p in server.task.nets.get("student").params]
    mean, beyond = fedbe_gaussian(start, ups.w, sizes, flat)
    deviation = beyond - mean
    np.testing.assert_allclose((drawn.mean(0) - mean) / deviation, 0, atol=5 / math.sqrt(n))
    np.testing.assert_allclose(drawn.std(0) / deviation, 1, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(len(mean)), atol=0.04)
    drawn = torch.stack(FedBE(samples=n, distribution="dirichlet").draw(server, models)).numpy()
    mixed = np.linalg.lstsq(ups.w.T, drawn.T, rcond=None)[0].T  # the shares that gave each model
    np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-9)
    assert mixed.min() >= -1e-9
    np.testing.assert_allclose(mixed.mean(0), 1 / k, atol=0.01)
    np.testing.assert_allclose(mixed.var(0), (k - 1) / (k**2 * (k + 1)), rtol=0.05)


# --- FedGen, FedFTG -------------------------------------------------------------------------------------------------

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
    size, hyper = 6, {"z_dim": Z, "iterations": 2, "student_steps": 3, "generator_lr": 0.002}
    run = play("fedftg", rounds=1, **hyper, server_batch=size, lambda_cls=0.05, lambda_dis=0.3, lr=0.2)
    (crossed,) = run.rounds
    teachers = [network(up["model"]).eval() for up in crossed.up.values()]
    shares, rng = label_shares(run, crossed.up), at_server("image generator", 1)
    owned = torch.tensor([run.counts(k) for k in crossed.up]).sum(0).float()
    before, found, generator = (loaded(ConditionalGenerator(SHAPE, CLASSES, Z), v) for v in (*kept, kept[0]))
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


# --- FedMD, FedHKD --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", ["joint", "first"])
def test_fedmds_clients_approach_the_mean_logits(digest: str) -> None:
    """Row 10: the consensus is the plain mean of logits; CE + weight KL(consensus || p), or an epoch of MAE before."""
    run = play("fedmd", rounds=2, **POOL, weight=0.8, digest=digest)
    (first, second), x = run.rounds, run.proxy()
    for crossed in run.rounds:
        for up in crossed.up.values():
            np.testing.assert_allclose(up["logits"].numpy(), exact(network(up["model"]), x)[0], rtol=1e-3, atol=1e-4)
    consensus = np.mean([up["logits"].double().numpy() for up in first.up.values()], axis=0)
    np.testing.assert_allclose(second.down["logits"].numpy(), consensus, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.model_after(1), averaged(first), rtol=1e-5, atol=1e-7)
    p, wanted = torch.from_numpy(softmax(consensus)).float(), torch.from_numpy(consensus).float()
    for k, up in second.up.items():
        rng = stream("public samples", 2, k)

        def agreeing(net: Classifier, _: Tensor, y: Tensor, rng: torch.Generator = rng) -> Tensor:
            ids = torch.randint(0, len(x), (len(y),), generator=rng)
            return 0.8 * kl(p[ids], net(x[ids]))

        if digest == "joint":
            expected = locally(run, k, second, agreeing)
        else:
            expected, (own_x, own_y) = network(second.down["model"]), run.held_by(k)
            for ids in torch.randperm(len(x), generator=stream("digest", 2, k)).split(256):
                descend(expected, (expected(x[ids]) - wanted[ids]).abs().mean())
            for ids in batches_of(k, 2, len(own_y)):
                descend(expected, F.cross_entropy(expected(own_x[ids]), own_y[ids]))
        assert_same_network(up["model"], expected)


def test_fedhkds_hyper_knowledge_is_the_mean_over_every_sample_of_a_class() -> None:
    """Row 11: each client's mean feature and mean softmax(logits / T) of each class, averaged by counts."""
    run = play("fedhkd", rounds=2, T=0.5)
    first, second = run.rounds
    features: list[list[Floats]] = [[] for _ in range(CLASSES)]
    predictions: list[list[Floats]] = [[] for _ in range(CLASSES)]
    for k, up in first.up.items():
        x, y = run.held_by(k)
        logits, said = exact(network(up["model"]), x)
        for i, c in enumerate(y.tolist()):
            features[c].append(said[i])
            predictions[c].append(softmax(logits[i] / 0.5))
        for c in range(CLASSES):
            own = said[y.numpy() == c]
            expected = own.mean(0) if len(own) else np.zeros(WIDTH)
            np.testing.assert_allclose(up["class_features"][c].numpy(), expected, rtol=1e-3, atol=1e-5)
    for c in range(CLASSES):
        assert second.down["counts"][c] == len(features[c])
        for name, rows, width in (("features", features[c], WIDTH), ("predictions", predictions[c], CLASSES)):
            part = f"class_{name}"
            expected = np.mean(rows, axis=0) if rows else np.zeros(width)
            np.testing.assert_allclose(second.down[part][c].numpy(), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(run.model_after(1), averaged(first), rtol=1e-5, atol=1e-7)


def test_fedhkds_clients_have_three_terms_and_a_clipped_gradient() -> None:
    """Row 11: CE + lambda KL(Q || softmax(h(H) / T)) + gamma MSE(f(x), H[y]), the gradient's norm cut at 1.1."""
    run = play("fedhkd", rounds=2, clip=1.1, **{"lambda": 0.9, "gamma": 1.5, "T": 0.5})
    bites = 0
    for crossed in run.rounds:
        known = [c for c in range(CLASSES) if crossed.down["counts"][c] > 0]
        h, q = crossed.down["class_features"], crossed.down["class_predictions"]
        assert bool(known) == (crossed.number > 1)
        for k, up in crossed.up.items():
            net, (x, y) = network(crossed.down["model"]), run.held_by(k)
            for ids in batches_of(k, crossed.number, len(y)):
                loss = F.cross_entropy(net(x[ids]), y[ids])
                for c in known:
                    log_p = (net.head(h[c : c + 1]) / 0.5).log_softmax(1)[0]
                    loss = loss + 0.9 * (q[c] * (q[c].log() - log_p)).sum() / len(known)
                said = net.features(x[ids])
                for i, c in enumerate(y[ids].tolist()):
                    if c in known:
                        loss = loss + 1.5 * (said[i] - h[c]).square().mean() / len(ids)
                params = list(net.parameters())
                grads = torch.autograd.grad(loss, params)
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
                bites += norm > 1.1
                with torch.no_grad():
                    for p, g in zip(params, grads, strict=True):
                        p.sub_(LR * min(1.0, 1.1 / norm) * g)
            assert_same_network(up["model"], net)
    assert bites


# --- CCVR, CReFF ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ccvr_draws_from_the_covariance_of_all_clients_features_and_trains_the_classifier() -> None:
    """Row 12: per class, the mean and covariance of all features at once; 1e-6 I added; cross-entropy on the draws."""
    settings = {"virtual": 12, "calibration_epochs": 3, "calibration_lr": 0.1}
    run = play("fedavg+ccvr", rounds=1, **settings)
    start = averaged(run.rounds[0])
    net = network(start)
    everyone = [run.held_by(k) for k in range(run.setup.federation.clients)]
    features, labels = exact(net, torch.cat([x for x, _ in everyone]))[1], torch.cat([y for _, y in everyone]).numpy()
    rng, virtual, classes = at_server("virtual features", 1), [], []
    for c in range(CLASSES):
        own = features[labels == c]
        if len(own) < 2:
            continue
        root = np.linalg.cholesky(np.cov(own.T) + 1e-6 * np.eye(WIDTH))
        noise = torch.randn(12, WIDTH, generator=rng, dtype=torch.float64).numpy()
        virtual.append(own.mean(0) + noise @ root.T)
        classes += [c] * 12
    x, y = torch.from_numpy(np.concatenate(virtual)).float(), torch.tensor(classes)
    for ids in epochs_of(len(y), 32, 3, at_server("calibration", 1)):
        descend(net.head, -net.head(x[ids]).log_softmax(1)[torch.arange(len(ids)), y[ids]].mean(), lr=0.1)
    assert_moved_alike(network(run.model_after(1)), net, network(start))


def head_gradient(weight: Tensor, bias: Tensor, x: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Of the mean cross-entropy of features that are all of class c: mean (p - e_c) x' and mean (p - e_c)."""
    error = (x @ weight.T + bias).softmax(1) - F.one_hot(torch.tensor(c), CLASSES)
    return error.T @ x / len(x), error.mean(0)


def as_head(vector: Tensor) -> tuple[Tensor, Tensor]:
    return vector[:-CLASSES].view(CLASSES, WIDTH).double(), vector[-CLASSES:].double()


CREFF: dict[str, Any] = {"features": 3, "match_steps": 4, "match_lr": 0.5, "retrain_epochs": 6, "retrain_lr": 0.2}
CREFF["retrain_batch"] = 8


def test_creffs_clients_send_the_re_trained_heads_gradients_on_the_features_they_were_sent() -> None:
    """Row 17: for each class the mean over draws of the gradient at the sent head, on features of the sent model."""
    run = play("creff", rounds=2, **CREFF, draws=3, draw_size=5)
    for crossed in run.rounds:
        weight, bias = as_head(crossed.down["head"])
        for k, up in crossed.up.items():
            x, y = run.held_by(k)
            features = torch.from_numpy(exact(network(crossed.down["model"]), x)[1])
            rng = stream("gradient draws", crossed.number, k)
            for c in range(CLASSES):
                own, total = features[y == c], torch.zeros(CLASSES * WIDTH + CLASSES, dtype=torch.float64)
                assert up["known"][c] == (len(own) > 0)
                for _ in range(3 if len(own) else 0):
                    some = own[torch.randint(len(own), (5,), generator=rng)]
                    total += torch.cat([part.flatten() for part in head_gradient(weight, bias, some, c)]) / 3
                torch.testing.assert_close(up["gradients"][c].double(), total, rtol=1e-3, atol=1e-5)
            assert_same_network(up["model"], locally(run, k, crossed, nothing))


def test_creffs_server_matches_the_gradients_and_re_trains_a_fresh_head() -> None:
    """Row 17: features descend sum_c sum_rows (1 - cos) to the mean gradient of the clients that have the class."""
    run = play("creff", rounds=3, **CREFF, draws=3, draw_size=5)
    shape = (CLASSES, CREFF["features"], WIDTH)
    synthetic = torch.randn(shape, generator=at_server("synthetic features", 0)).double()
    fresh = FlatNet(copy.deepcopy(run.result.model)).unflatten(run.setup.task.build("fresh classifier").read())
    for crossed, following in zip(run.rounds[:-1], run.rounds[1:], strict=True):
        torch.testing.assert_close(following.down["model"], averaged(crossed), rtol=1e-5, atol=1e-7)
        weight, bias = as_head(crossed.down["head"])
        for _ in range(CREFF["match_steps"]):
            x, distance = synthetic.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
            for c in range(CLASSES):
                owners = [up["gradients"][c].double() for up in crossed.up.values() if up["known"][c]]
                if not owners:
                    continue
                wanted_w, wanted_b = as_head(torch.stack(owners).mean(0))
                found_w, found_b = head_gradient(weight, bias, x[c], c)
                for a, b in [*zip(found_w, wanted_w, strict=True), (found_b, wanted_b)]:
                    distance = distance + 1 - (a @ b) / (a.norm() * b.norm())
            synthetic = synthetic - CREFF["match_lr"] * torch.autograd.grad(distance, x)[0]
        w, b = fresh["head.weight"].double(), fresh["head.bias"].double()
        rows = [(synthetic[c, i : i + 1], c) for c in range(CLASSES) for i in range(CREFF["features"])]
        order = at_server("re-training", crossed.number)
        for ids in epochs_of(len(rows), CREFF["retrain_batch"], CREFF["retrain_epochs"], order):
            each = [head_gradient(w, b, *rows[i]) for i in ids.tolist()]
            w = w - CREFF["retrain_lr"] * torch.stack([g for g, _ in each]).mean(0)
            b = b - CREFF["retrain_lr"] * torch.stack([g for _, g in each]).mean(0)
        found_w, found_b = as_head(following.down["head"])
        torch.testing.assert_close(found_w, w, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found_b, b, rtol=1e-3, atol=1e-4)
