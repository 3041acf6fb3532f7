"""What DaFKD's clients and server compute in real rounds, in float64, against loops written from the equations.

Each test runs the method with a tap on the wire and works out, from what crossed before, what should have crossed
next. Only random draws are shared: their streams are named by purpose, round and client.
In float64 both agree to 1e-12 on every processor; 1e-9 is asked for.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.distill.generators import ConditionalGenerator, TransposedGenerator
from fedstill.methods.dafkd import DaFKD
from fedstill.models import Classifier
from support.play import (
    CLASSES,
    SHAPE,
    WIDTH,
    Play,
    assert_moved_alike,
    at_server,
    averaged,
    batches_of,
    distilled,
    epochs_of,
    flat,
    kl,
    loaded,
    locally,
    noted_targets,
    nothing,
    play,
    probabilities,
    stream,
)
from support.recorder import Round
from support.wiretap import (
    exact,
    network,
)

pytestmark = pytest.mark.usefixtures("float64")

WITHIN = 1e-9
assert_equal = partial(torch.testing.assert_close, rtol=WITHIN, atol=1e-12)
assert_arrived = partial(assert_moved_alike, within=WITHIN)

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


def image_generator(vector: Tensor, method: DaFKD) -> nn.Module:
    made = ConditionalGenerator(SHAPE, CLASSES, Z) if method.conditional else TransposedGenerator(SHAPE, Z)
    module: nn.Module = loaded(made, vector)
    return module


def fakes(run: Play, generator: nn.Module, count: int, noise: torch.Generator) -> Tensor:
    """G(z), standardised as the data are; of random labels if the generator takes one."""
    z = torch.randn(count, Z, generator=noise)
    if isinstance(generator, ConditionalGenerator):
        images: Tensor = generator(z, torch.randint(0, CLASSES, (count,), generator=noise))
        return images
    dataset = run.setup.federation.dataset
    inputs: Tensor = (generator(z) - dataset.mean[0]) / dataset.std[0]
    return inputs


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
    method = run.setup.method
    assert isinstance(method, DaFKD)
    net, (x, y) = network(crossed.down["model"]), run.held_by(k)
    generator, judge = image_generator(crossed.down["generator"], method), Judge(head, net)
    adam = torch.optim.Adam(generator.parameters(), 1e-3, betas=(method.generator_beta1, method.generator_beta2))
    noise = stream("adversarial noise", crossed.number, k)
    for ids in batches_of(k, crossed.number, len(y)):
        with torch.no_grad():
            negatives = fakes(run, generator, len(ids), noise)
        real, fake = judge(x[ids]), judge(negatives)
        l_adv = -(real.log().sum() + (1 - fake).log().sum()) / (2 * len(ids))  # Eq. 2
        if method.penalty:
            others = fakes(run, generator, max(2, len(ids)), noise)[: len(ids)]
            share = torch.rand(len(ids), 1, 1, 1, generator=noise)
            between = share * x[ids] + (1 - share) * others
            l_adv = l_adv + method.penalty * sum(steepness(judge, each) for each in between) / len(ids)
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


def steepness(judge: Judge, sample: Tensor) -> Tensor:
    """(|grad D(x)| - 1)^2 of one sample."""
    x = sample.detach().unsqueeze(0).requires_grad_()
    (gradient,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
    return (gradient.square().sum().sqrt() - 1) ** 2


def first_judge(run: Play, method: DaFKD) -> Tensor:
    """The discriminator that every client starts its first round with."""
    return method.discriminator(run.setup.task).initial()


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [("variant", "full"), ("variant", "no-sharing"), ("conditional", True), ("penalty", 0.3), ("generator_beta1", 0.5)],
    ids=str,
)
def test_dafkds_clients_train_on_the_joint_loss_and_their_generators_ascend(setting: tuple[str, Any]) -> None:
    """Eq. 2, 3 and 9. In its second round a client has its own head again, on the trunk that the server sent."""
    run, method = dafkd(setting)
    judges: dict[int, Tensor] = {}
    again = set(run.rounds[0].up) & set(run.rounds[1].up)
    assert again
    for crossed in run.rounds:
        for k, up in crossed.up.items():
            if k in again:
                judge_then = judges.get(k, first_judge(run, method))
                net, generator, judge = dafkd_client(run, k, crossed, judge_then)
                assert_arrived(network(up["model"]), net, network(crossed.down["model"]))
                assert_arrived(Judge(up["discriminator"], net), judge, Judge(judge_then, net))
                sent, start = (image_generator(v, method) for v in (up["generator"], crossed.down["generator"]))
                assert_arrived(sent, generator, start)
            judges[k] = up["discriminator"]


def test_without_sharing_dafkds_classifier_learns_from_the_cross_entropy_alone() -> None:
    """Sec. 4.2 (no-sharing): a separate discriminator leaves the classifier of Eq. 1 alone."""
    run, _ = dafkd(("variant", "no-sharing"))
    for crossed in run.rounds:
        for k, up in crossed.up.items():
            assert_arrived(network(up["model"]), locally(run, k, crossed, nothing), network(crossed.down["model"]))


def test_after_adv_rounds_dafkds_clients_train_on_the_cross_entropy_and_keep_their_adversaries() -> None:
    """The option to freeze generator and discriminators after the first rounds."""
    run, method = dafkd(("adv_rounds", 1))
    first, second = run.rounds
    for k, up in second.up.items():
        assert_arrived(network(up["model"]), locally(run, k, second, nothing), network(second.down["model"]))
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


@pytest.mark.slow
@pytest.mark.parametrize("setting", DAFKD_SERVERS, ids=str)
def test_dafkds_server_averages_uniformly_and_distils_by_the_correlations(setting: tuple[str, Any]) -> None:
    """Eq. 4, 6, 7 and 8; the first round only averages. In the private variant alpha_k softmax(w_k) is what crosses.

    With logit_T, logits are averaged, and matched at that temperature.
    """
    run, method = dafkd(setting)
    first, second = run.rounds
    new_g = [averaged(crossed, "generator", uniform=method.uniform) for crossed in run.rounds]
    assert_equal(run.model_after(1), averaged(first, uniform=method.uniform))
    assert_equal(second.down["generator"], new_g[0])
    start = averaged(second, uniform=method.uniform)
    if method.variant == "no-distill":
        assert_equal(run.model_after(2), start)
        return
    x = pseudo_set(run, method, second.down["generator"] if method.private else new_g[1], 2)
    weighted, total = torch.zeros(len(x), CLASSES), torch.zeros(len(x), 1)
    for k, up in second.up.items():
        net = network(up["model"])
        alpha = torch.ones(len(x), 1)
        if method.variant != "no-correlation":
            judge = judge_of(run, method, k) if method.private else Judge(up["discriminator"], net)
            alpha = judge(x).detach().unsqueeze(1)
        outputs = torch.from_numpy(exact(net, x)[0]) if method.logit_T else probabilities(net, x)
        share = alpha + (0 if method.private else 1e-8)  # all count alike where no discriminator knows a sample
        weighted += share * outputs
        total += share
        if method.private:
            assert "discriminator" not in up
            assert_equal(up["predictions"], alpha * outputs)
    if method.private:
        weighted, total = weighted + 1e-8 / CLASSES, total + 1e-8
    t = method.logit_T or 1.0
    targets = (weighted / total / t).softmax(1) if method.logit_T else weighted / total
    assert_equal(run.targets[0], targets)
    expected = distilled(
        start,
        lambda net, ids: t**2 * kl(targets[ids], net(x[ids]) / t),
        epochs_of(len(x), 8, 1, at_server("distillation", 2)),
        partial(torch.optim.Adam, lr=0.01),
    )
    assert_arrived(network(run.model_after(2)), expected, network(start))


def judge_of(run: Play, method: DaFKD, k: int) -> Judge:
    """A client's discriminator after its second round, which did not cross: worked out from the start."""
    first, second = run.rounds
    head = first_judge(run, method)
    if k in first.up:
        head = dafkd_client(run, k, first, head)[2].head.detach()
    return dafkd_client(run, k, second, head)[2]
