"""A client's round of FedKF is Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core import seeds, tree
from fedstill.core.weights import FlatNet
from fedstill.distill.generators import ImageGenerator
from fedstill.methods.fedkf import FedKF
from fedstill.models import Classifier
from support.fedkf import SHAPE, TINY, WIDTH, Z, generated, moved
from support.runs import SMALL, slow
from support.wiretap import (
    assert_same_tree,
    batch_ids,
    client_of,
    client_states,
    descend,
    held_by,
    local_round,
    network,
    setup_of,
    taped,
)


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
            loss = loss - method.gamma * divergence(logits.detach(), student(images))
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
