"""FedKF against its equations and Algorithm 1, written out: generator, student, and the two averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core import seeds, tree
from fedstill.core.weights import FlatNet
from fedstill.data.federation import from_clients
from fedstill.distill.generators import ImageGenerator
from fedstill.methods.fedkf import FedKF
from fedstill.models import Classifier
from fedstill.train.evaluate import Outputs
from support.recorder import Round
from support.runs import SMALL, RunSmall, numbers, slow, weights
from support.wiretap import (
    LR,
    Floats,
    assert_as_declared,
    assert_same_network,
    assert_same_tree,
    batch_ids,
    client_of,
    client_states,
    descend,
    global_test,
    held_by,
    local_round,
    model_copies,
    network,
    resumed_after_every_round,
    setup_of,
    softmax,
    taped,
)

Z, WIDTH = 6, 8
TINY: dict[str, Any] = {"z_dim": Z, "width": WIDTH}
SHAPE = (1, 16, 16)


def moved(vector: Tensor, seed: int) -> Tensor:
    """Weights somewhere near."""
    return vector + 0.1 * torch.randn(len(vector), generator=torch.Generator().manual_seed(seed))


# --- the generator's loss, Eq. 1 to 4 ---------------------------------------------------------------------------


def generator_loss(logits: Floats, features: Floats, method: FedKF) -> float:
    p = softmax(logits)
    n, classes = p.shape
    l_ce = -sum(math.log(p[i, p[i].argmax()]) for i in range(n)) / n  # Eq. 1
    mean = p.mean(0)
    l_ie = sum(mean[c] * math.log(mean[c]) for c in range(classes))  # Eq. 2
    if method.ie_normalised:
        l_ie = 1 + l_ie / math.log(classes)
    l_a = -sum(np.abs(features[i]).sum() for i in range(n)) / n  # Eq. 3
    if method.activation_mean:
        l_a /= features.shape[1]
    return float(l_ie + method.lambda1 * l_ce + method.lambda2 * l_a)  # Eq. 4


def differences(f: Callable[[Floats], float], at: Floats, step: float = 1e-6) -> Floats:
    """Gradient by central differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        move = np.zeros_like(at)
        move[place] = step
        found[place] = (f(at + move) - f(at - move)) / (2 * step)
    return found


@pytest.mark.parametrize("ie_normalised", [True, False])
@pytest.mark.parametrize("activation_mean", [True, False])
@pytest.mark.parametrize(("lambda1", "lambda2"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.7), (0.3, 0.7)])
def test_the_generators_loss_and_gradient_are_those_of_the_paper(
    ie_normalised: bool, activation_mean: bool, lambda1: float, lambda2: float
) -> None:
    method = FedKF(lambda1=lambda1, lambda2=lambda2, ie_normalised=ie_normalised, activation_mean=activation_mean)
    rng = np.random.default_rng(0)
    l64, f64 = rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
    logits, features = (torch.tensor(v, requires_grad=True) for v in (l64, f64))
    loss = method.generator_loss(Outputs(logits, features))
    assert loss.item() == pytest.approx(generator_loss(l64, f64, method), rel=1e-12)
    by_logits, by_features = torch.autograd.grad(loss, [logits, features])
    np.testing.assert_allclose(
        by_logits.numpy(), differences(lambda v: generator_loss(v, f64, method), l64), rtol=1e-5, atol=1e-8
    )
    np.testing.assert_allclose(
        by_features.numpy(), differences(lambda v: generator_loss(l64, v, method), f64), rtol=1e-5, atol=1e-8
    )


def test_the_normalised_entropy_is_0_for_classes_in_balance_and_1_for_a_single_class() -> None:
    method, features = FedKF(lambda1=0, lambda2=0), torch.zeros(4, 3)
    assert method.generator_loss(Outputs(100 * torch.eye(4), features)).item() == pytest.approx(0, abs=1e-6)
    single = torch.tensor([[100.0, 0, 0, 0]]).repeat(4, 1)
    assert method.generator_loss(Outputs(single, features)).item() == pytest.approx(1, abs=1e-6)


# --- the generator ----------------------------------------------------------------------------------------------


def generated(named: Mapping[str, Tensor], z: Tensor, side: int = 16, width: int = WIDTH) -> Tensor:
    """Images from noise: Linear, BN, up, conv, BN(0.8), LReLU, up, conv, BN(0.8), LReLU, conv, sigmoid."""

    def norm(h: Tensor, layer: str, eps: float) -> Tensor:
        mean, var = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), keepdim=True, unbiased=False)
        scale, shift = (named[f"stages.{layer}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
        return (h - mean) / (var + eps).sqrt() * scale + shift

    def conv(h: Tensor, layer: str) -> Tensor:
        return F.conv2d(h, named[f"stages.{layer}.weight"], named[f"stages.{layer}.bias"], padding=1)

    def doubled(h: Tensor) -> Tensor:
        return h.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def leaky(h: Tensor) -> Tensor:
        return torch.where(h > 0, h, 0.2 * h)

    h = z @ named["fc.weight"].T + named["fc.bias"]
    h = h.view(len(z), side // 4, side // 4, width).permute(0, 3, 1, 2)
    h = conv(doubled(norm(h, "0", 1e-5)), "2")
    h = conv(doubled(leaky(norm(h, "3", 0.8))), "6")
    h = conv(leaky(norm(h, "7", 0.8)), "9")
    return 1 / (1 + (-h).exp())


def test_the_generator_is_the_one_of_the_specification() -> None:
    torch.manual_seed(0)
    net = ImageGenerator((3, 32, 32), z_dim=5, width=6).double().train()
    for p in net.parameters():
        nn.init.normal_(p)
    z = torch.randn(4, 5, dtype=torch.float64)
    named = dict(net.named_parameters())
    torch.testing.assert_close(net(z), generated(named, z, side=32, width=6))
    assert net(z).shape == (4, 3, 32, 32)


@pytest.mark.parametrize(
    ("shape", "z_dim", "parameters", "mmac"),
    [((1, 32, 32), 100, 1.05e6, 115), ((3, 32, 32), 1000, 8.42e6, 123)],
)
def test_the_generators_size_and_cost(shape: tuple[int, int, int], z_dim: int, parameters: float, mmac: float) -> None:
    net, macs = ImageGenerator(shape, z_dim), 0

    def count(layer: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal macs
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        macs += layer.weight.numel() * (out.shape[2] * out.shape[3] if out.dim() == 4 else 1)

    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    assert net(torch.randn(2, z_dim)).shape == (2, *shape)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(parameters, rel=0.005)
    assert macs / 1e6 == pytest.approx(mmac, rel=0.005)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 30, 17), (2, 5, 6)])
def test_the_generator_makes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    made = ImageGenerator(shape, 4, 4)(torch.randn(3, 4)).detach()
    assert made.shape == (3, *shape)
    assert float(made.min()) > 0
    assert float(made.max()) < 1


# --- a client's round, Algorithm 1 ------------------------------------------------------------------------------


@cache
def statistics() -> tuple[float, float]:
    """Mean and deviation of the pixels of the small run's data."""
    dataset = fedstill.load_dataset("fashion-mini", image_size=16)
    return dataset.mean[0], dataset.std[0]


@dataclass
class PlainGenerator:
    """A generator and its Adam, both written out."""

    named: dict[str, Tensor]
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def initial(cls) -> PlainGenerator:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.key(0, "generator"))
            net = ImageGenerator(SHAPE, Z, WIDTH)
        return cls({name: p.detach().clone() for name, p in net.named_parameters()})

    def images(self, z: Tensor) -> Tensor:
        """As a network sees them."""
        mean, std = statistics()
        return (generated(self.named, z) - mean) / std

    def step(self, loss: Callable[[], Tensor], lr: float) -> None:
        for p in self.named.values():
            p.requires_grad_(True)
        grads = torch.autograd.grad(loss(), list(self.named.values()))
        self.steps += 1
        for (name, p), grad in zip(self.named.items(), grads, strict=True):
            m = self.first[name] = 0.9 * self.first.get(name, torch.zeros_like(p)) + 0.1 * grad
            v = self.second[name] = 0.999 * self.second.get(name, torch.zeros_like(p)) + 0.001 * grad**2
            unbiased = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
            self.named[name] = (p - lr * unbiased[0] / (unbiased[1].sqrt() + 1e-8)).detach()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def client_update(
    start: Tensor, teacher: Classifier, generator: PlainGenerator, client: int, round_: int, method: FedKF
) -> Classifier:
    """ClientUpdate of Algorithm 1 by a plain loop, the student's two losses each with a pass of its own."""
    student, (x, y) = network(start), held_by(client)
    noise = seeds.torch_rng(0, "noise", round_, client)

    def l_g() -> Tensor:
        images = generator.images(z)
        features = teacher.features(images)
        logits: Tensor = teacher.head(features)
        p = logits.softmax(1)
        mean = p.mean(0)
        l_ie = 1 + (mean * mean.log()).sum() / math.log(10)
        l_ce = -p.amax(1).log().mean()
        l_a = -features.abs().mean()
        loss: Tensor = l_ie + method.lambda1 * l_ce + method.lambda2 * l_a
        if method.gen_adversarial:
            loss = loss - method.gamma * divergence(logits, student(images))
        return loss

    for ids in batch_ids(client, round_):
        z = torch.randn(len(ids), Z, generator=noise)
        if method.gen_first:
            generator.step(l_g, method.beta)
        with torch.no_grad():
            images = generator.images(z)
            taught = teacher(images)
        loss = F.cross_entropy(student(x[ids]), y[ids]) + method.gamma * divergence(taught, student(images))
        descend(student, loss)
        if not method.gen_first:
            generator.step(l_g, method.beta)
    return student


# A bias just before BatchNorm has no effect; its gradient is rounding, which Adam turns into steps of any sign.
NO_EFFECT = ("stages.2.bias", "stages.6.bias")


def generator_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a client's generator by name."""
    net = FlatNet(ImageGenerator(SHAPE, Z, WIDTH))
    named = net.unflatten(state["generator"])
    return {entry.name: named[entry.name].clone() for entry in net.entries if entry.trainable}


def distance(found: Iterable[Tensor], expected: Iterable[Tensor], start: Iterable[Tensor]) -> float:
    """How far from where it should be, as a share of the way from the start."""
    there, wanted, before = (torch.cat([t.detach().flatten() for t in end]) for end in (found, expected, start))
    return float((there - wanted).norm() / (wanted - before).norm())


def generator_distance(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    ends = ([end[name] for name in end if name not in NO_EFFECT] for end in (found, expected, start))
    return distance(*ends)


def assert_rounding_only(distances: list[float], usually: float, at_most: float) -> None:
    """Rounding now and then tips a max-pooling, of which Adam makes more; the usual client does not see that."""
    assert sorted(distances)[(len(distances) - 1) // 2] < usually
    assert max(distances) < at_most


def kept(client: fedstill.Client) -> dict[str, Any]:
    """What a client keeps, as it comes back from disk."""
    state: dict[str, Any] = tree.decode(tree.encode(client.touched_state or {}))
    return state


VARIANTS: list[Any] = [
    {},
    slow({"gen_first": False}),
    {"gen_adversarial": True},
    slow({"gen_adversarial": True, "gen_first": False}),
    slow({"reset_generator": True}),
    slow({"t1": False}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) or "paper")
def test_every_clients_rounds_equal_algorithm_1_by_a_plain_loop(tmp_path: Path, variant: dict[str, Any]) -> None:
    settings = TINY | {"gamma": 2.0, "lambda1": 0.5, "lambda2": 0.7, "beta": 0.001} | variant
    _, tape = taped("fedkf", rounds=3, out=tmp_path / "run", **settings)
    setup, method = setup_of("fedkf", **settings), FedKF(**settings)
    generators: dict[int, PlainGenerator] = {}
    states: dict[int, dict[str, Any]] = {}
    students, first_time, returned = list[float](), list[float](), list[float]()
    for crossed in tape[1:]:
        start, teacher = crossed.down["model"], network(crossed.down["teacher" if method.t1 else "model"])
        for k, up in crossed.up.items():
            client = client_of(setup, k, crossed.number, crossed.down, states.get(k))
            assert_same_tree(local_round(setup.method, client), up)  # the run gave every client its own state
            again = k in states and not method.reset_generator
            if again:  # from the same weights, so that rounding does not add up; with moments of its own
                generators[k].named = generator_weights(states[k])
            else:
                generators[k] = PlainGenerator.initial()
            before = dict(generators[k].named)
            expected = client_update(start, teacher, generators[k], k, crossed.number, method)
            states[k] = kept(client)
            off = generator_distance(generator_weights(states[k]), generators[k].named, before)
            (returned if again else first_time).append(off)
            ends = (net.parameters() for net in (network(up["model"]), expected, network(start)))
            students.append(distance(*ends))
    assert_rounding_only(first_time, usually=0.05, at_most=0.25)
    assert_rounding_only(students, usually=1e-4, at_most=0.02)
    if not method.reset_generator:
        assert len(returned) > 1, "some clients must have come back"
        assert_rounding_only(returned, usually=0.05, at_most=0.25)
    assert_same_tree(client_states(tmp_path / "run"), dict(sorted(states.items())))


def test_a_generators_adam_goes_on_where_it_stopped() -> None:
    """The moments that a client gets back are those of the same weights as before."""
    setup = setup_of("fedkf", beta=0.01, **TINY)
    w0 = setup.task.initial
    down = {"model": moved(w0, 1), "teacher": moved(w0, 2)}
    teacher, generator, method = network(down["teacher"]), PlainGenerator.initial(), setup.method
    assert isinstance(method, FedKF)
    state: dict[str, Any] = {}
    for round_ in (2, 3):
        client = client_of(setup, 3, round_, down, state)
        local_round(method, client)
        state, before = kept(client), dict(generator.named)
        client_update(down["model"], teacher, generator, 3, round_, method)
        off = generator_distance(generator_weights(state), generator.named, before)
        assert off < 0.25, f"round {round_}"


def test_the_generator_does_not_learn_from_the_student() -> None:
    """With the same teacher, another student or another weight of its loss leaves the generator's bits alone."""
    for gen_first in (True, False):
        found = []
        for student, gamma in ((1, 1.0), (2, 1.0), (1, 30.0)):
            setup = setup_of("fedkf", gamma=gamma, gen_first=gen_first, **TINY)
            w0 = setup.task.initial
            client = client_of(setup, 0, 2, {"model": moved(w0, student), "teacher": moved(w0, 9)})
            local_round(setup.method, client)
            found.append(client.state)
        assert_same_tree(found[1], found[0])
        assert_same_tree(found[2], found[0])


def test_teacher_stays_frozen_in_evaluation_mode_and_without_gradient() -> None:
    for variant in ({}, {"gen_adversarial": True}, {"gen_first": False}):
        setup = setup_of("fedkf", **TINY, **variant)
        w0 = setup.task.initial
        sent = {"model": moved(w0, 1), "teacher": moved(w0, 2)}
        down = {name: vector.clone() for name, vector in sent.items()}
        teacher, modes = setup.task.nets.get("teacher"), set[bool]()
        teacher.module.get_submodule("body").register_forward_hook(lambda m, _, __, seen=modes: seen.add(m.training))
        up = local_round(setup.method, client_of(setup, 0, 2, down))
        assert modes == {False}
        assert torch.equal(teacher.read(), sent["teacher"])
        assert all(p.grad is None for p in teacher.params)
        assert_same_tree(down, sent)
        assert not torch.equal(up["model"], sent["model"])


@pytest.mark.parametrize("gen_adversarial", [False, True])
def test_the_generators_step_leaves_the_student_alone(gen_adversarial: bool) -> None:
    """BatchNorm's statistics are part of the student: only its own steps may move them."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    config = resolve(SMALL | TINY | {"method": "fedkf", "gen_adversarial": gen_adversarial})
    setup = prepare(config, model=model)
    client = client_of(setup, 3, 2, {"model": setup.task.initial, "teacher": moved(setup.task.initial, 1)})
    local_round(setup.method, client)
    assert client.trained is not None
    module = client.net.get_submodule("module.2")
    assert isinstance(module, nn.BatchNorm1d)
    assert module.num_batches_tracked is not None
    assert int(module.num_batches_tracked) == client.trained.steps


def test_local_and_generated_samples_go_through_the_student_in_one_pass() -> None:
    for gen_first in (True, False):
        setup = setup_of("fedkf", gen_first=gen_first, **TINY)
        passes: list[int] = []
        student = setup.task.nets.get("student").module
        student.get_submodule("body").register_forward_pre_hook(lambda _, x, seen=passes: seen.append(len(x[0])))
        w0 = setup.task.initial
        local_round(setup.method, client_of(setup, 3, 2, {"model": w0, "teacher": moved(w0, 1)}))
        assert passes == [2 * len(ids) for ids in batch_ids(3, 2)]


def test_the_generator_steps_first_as_in_algorithm_1_or_after_the_student() -> None:
    """In a round of one step, how the generator learns matters to the student only if it learns first."""
    for gen_first in (True, False):
        ups = []
        for beta in (0.001, 0.1):
            setup = setup_of("fedkf", gen_first=gen_first, beta=beta, batch_size=500, **TINY)
            w0 = setup.task.initial
            ups.append(
                local_round(setup.method, client_of(setup, 0, 2, {"model": w0, "teacher": moved(w0, 1)}))["model"]
            )
        assert torch.equal(*ups) == (not gen_first)


def test_a_reset_generator_forgets_what_the_client_kept() -> None:
    ups = []
    for state in ({}, {"generator": "garbage", "optimizer": "garbage"}):
        setup = setup_of("fedkf", reset_generator=True, **TINY)
        w0 = setup.task.initial
        client = client_of(setup, 0, 5, {"model": w0, "teacher": moved(w0, 1)}, state)
        ups.append(local_round(setup.method, client)["model"])
    assert torch.equal(*ups)


def test_the_first_round_is_plain_training_and_leaves_no_generator(tmp_path: Path) -> None:
    _, plain = taped("fedavg", rounds=1)
    _, kf = taped("fedkf", rounds=1, gamma=50.0, out=tmp_path / "run", **TINY)
    for k, up in plain[0].up.items():
        assert torch.equal(kf[0].up[k]["model"], up["model"])
    assert not client_states(tmp_path / "run")


def test_with_gamma_zero_every_student_is_fedavgs() -> None:
    _, plain = taped("fedavg")
    for variant in ({}, {"gen_first": False, "gen_adversarial": True}):
        _, kf = taped("fedkf", gamma=0.0, **TINY, **variant)
        for a, b in zip(plain, kf, strict=True):
            assert torch.equal(a.down["model"], b.down["model"])
            assert_same_tree(a.up, b.up)


def test_noise_leaves_the_order_of_batches_alone() -> None:
    _, plain = taped("fedavg", rounds=2)
    _, kf = taped("fedkf", rounds=2, gamma=1e-9, **TINY)
    for a, b in zip(plain, kf, strict=True):
        for k, up in a.up.items():
            torch.testing.assert_close(b.up[k]["model"], up["model"], rtol=1e-3, atol=1e-5)


# --- the two averages -------------------------------------------------------------------------------------------


def mean_of(pairs: list[tuple[int, Tensor]]) -> Tensor:
    """sum n_k w_k / sum n_k, in float64."""
    total = sum(n for n, _ in pairs)
    return torch.stack([n / total * w.double() for n, w in pairs]).sum(0)


def oca_after(tape: list[Round], cache_init: str) -> Tensor:
    """The mean over all clients' latest models; unseen clients left out, or with the initial weights."""
    w0, sizes = tape[0].down["model"], setup_of("fedkf").federation.sizes.tolist()
    cache = dict.fromkeys(range(len(sizes)), w0) if cache_init == "w0" else {}
    for crossed in tape:
        cache |= {k: up["model"] for k, up in crossed.up.items()}
    return mean_of([(sizes[k], w) for k, w in cache.items()])


def aca_after(tape: list[Round]) -> Tensor:
    return mean_of([(tape[-1].samples[k], up["model"]) for k, up in tape[-1].up.items()])


@pytest.mark.slow
@pytest.mark.parametrize("cache_init", ["seen", "w0"])
def test_student_and_teacher_are_the_means_over_active_and_over_all_clients(cache_init: str) -> None:
    # averages do not depend on how clients learn: gamma = 0 is quick
    result, tape = taped("fedkf", rounds=8, participation=0.34, cache_init=cache_init, gamma=0.0)
    w0 = tape[0].down["model"]
    assert torch.equal(tape[0].down["teacher"], w0)
    seen: set[int] = set()
    for t in range(1, len(tape)):
        seen |= set(tape[t - 1].up)
        torch.testing.assert_close(tape[t].down["model"].double(), aca_after(tape[:t]), rtol=1e-6, atol=1e-8)
        oca = oca_after(tape[:t], cache_init)
        torch.testing.assert_close(tape[t].down["teacher"].double(), oca, rtol=1e-6, atol=1e-8)
    assert len(set(tape[0].up)) < len(seen), "clients must have changed"
    oca, aca = oca_after(tape, cache_init), aca_after(tape)
    assert_same_network(oca.float(), _classifier(result.model))
    x, y = global_test()
    for record, vector in ((result.records[-1], oca), (result.records[-1]["also"]["ACA"], aca)):
        accuracy = float((network(vector.float())(x).argmax(1) == y).double().mean())
        assert record["accuracy"] == pytest.approx(accuracy, abs=0.002)


def _classifier(module: nn.Module) -> Classifier:
    assert isinstance(module, Classifier)
    return module


@pytest.mark.parametrize("cache_init", ["seen", "w0"])
def test_full_participation_makes_the_two_means_equal(cache_init: str) -> None:
    _, tape = taped("fedkf", rounds=5, participation=1.0, cache_init=cache_init, gamma=0.0)
    for crossed in tape:
        torch.testing.assert_close(crossed.down["teacher"], crossed.down["model"], rtol=1e-6, atol=1e-8)


def test_without_t1_one_model_is_sent_and_it_is_the_model() -> None:
    result, tape = taped("fedkf", t1=False, rounds=4, gamma=0.0)
    for t in range(1, len(tape)):
        assert set(tape[t].down) == {"model"}
        torch.testing.assert_close(tape[t].down["model"].double(), aca_after(tape[:t]), rtol=1e-6, atol=1e-8)
    assert_same_network(aca_after(tape).float(), _classifier(result.model))
    assert "also" not in result.records[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "copies"), [({}, 2), ({"t1": False}, 1)])
def test_what_crosses_is_what_is_declared(variant: dict[str, Any], copies: int) -> None:
    result, tape = taped("fedkf", **TINY, **variant)
    assert_as_declared("fedkf", tape, **TINY, **variant)
    for record, crossed in zip(result.records, tape, strict=True):
        assert model_copies(crossed.down) == len(crossed.down) == copies
        assert all(set(up) == {"model"} for up in crossed.up.values()), "the generator never leaves its client"
        size = 4 * len(crossed.down["model"])
        assert record["bytes_down"] == copies * size * len(crossed.up)
        assert record["bytes_up"] == size * len(crossed.up)


# --- what clients keep ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resumed_after_every_round_gives_the_same_bits(run_small: RunSmall, tmp_path: Path) -> None:
    settings = TINY | {"cache_init": "w0", "rounds": 3, "lr": LR}
    whole = run_small("fedkf", out=tmp_path / "whole", **settings)
    broken = resumed_after_every_round("fedkf", tmp_path / "broken", **settings)
    assert torch.equal(weights(broken), weights(whole))
    assert numbers(broken) == numbers(whole)
    states = client_states(tmp_path / "whole")
    assert len(states) > 3, "in the two rounds with a teacher"
    assert_same_tree(client_states(tmp_path / "broken"), states)


@pytest.mark.slow
def test_same_bits_in_worker_processes(run_small: RunSmall, tmp_path: Path) -> None:
    settings = TINY | {"rounds": 3}
    inline = run_small("fedkf", out=tmp_path / "inline", **settings)
    process = run_small("fedkf", out=tmp_path / "process", engine="process", workers=2, **settings)
    assert torch.equal(weights(inline), weights(process))
    assert numbers(inline) == numbers(process)
    assert_same_tree(client_states(tmp_path / "inline"), client_states(tmp_path / "process"))


def test_every_client_has_a_generator_of_its_own(run_small: RunSmall, tmp_path: Path) -> None:
    run_small("fedkf", out=tmp_path / "run", participation=1.0, rounds=2, **TINY)
    states = client_states(tmp_path / "run")
    assert len(states) == SMALL["clients"]
    made = {tuple(state["generator"][:50].tolist()) for state in states.values()}
    assert len(made) == len(states)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_pictures_are_images_with_values_from_0_to_1(count: int) -> None:
    setup = setup_of("fedkf", **TINY)
    assert setup.method.pictures(setup.task, {}, count) is None, "a client that never had a generator"
    w0 = setup.task.initial
    client = client_of(setup, 0, 2, {"model": w0, "teacher": moved(w0, 1)})
    local_round(setup.method, client)
    made = setup.method.pictures(setup.task, client.state, count)
    assert made is not None
    assert made.shape == (count, *SHAPE)
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1
    assert float(made.std()) > 0
    again = setup.method.pictures(setup.task, client.state, count)
    assert again is not None
    assert torch.equal(made, again)


# --- what is refused --------------------------------------------------------------------------------------------


def test_data_that_are_not_images_are_refused() -> None:
    g = torch.Generator().manual_seed(0)
    shares = [(torch.randn(10, 6, generator=g), torch.randint(0, 3, (10,), generator=g)) for _ in range(4)]
    federation = from_clients(shares, test=shares[0], test_fraction=0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(fedstill.SettingError, match=r"needs data of shape \(channels, height, width\), got \(6,\)"):
        fedstill.run("fedkf", data=federation, model=model, rounds=1, engine="inline")


def test_t1_on_top_of_fedkf_is_refused_since_fedkf_has_it(run_small: RunSmall) -> None:
    with pytest.raises(fedstill.SettingError, match="t1"):
        run_small("fedkf+t1", **TINY)


def test_the_papers_settings_are_the_defaults() -> None:
    method = FedKF()
    assert (method.lambda1, method.lambda2, method.gamma, method.beta) == (0.01, 0.1, 1.0, 1e-3)
    assert (method.z_dim, method.width, method.cache_init, method.t1) == (100, 128, "seen", True)
    assert (method.gen_first, method.reset_generator, method.gen_adversarial) == (True, False, False)
    assert (method.ie_normalised, method.activation_mean) == (True, True)


def test_fedkf_refuses_a_network_that_shows_no_features(run_small: RunSmall) -> None:
    silent = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.LogSoftmax(dim=1))
    with pytest.raises(fedstill.SettingError, match="penultimate features"):
        run_small("fedkf", model=silent, **TINY)
