"""What groups of clients with different networks teach each other, in float64, against loops from the equations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedstill.building.config import resolve
from fedstill.building.groups import Group
from fedstill.building.setup import Setup, prepare
from fedstill.core import tree
from fedstill.distill.generators import FeatureGenerator, TransposedGenerator
from fedstill.methods.dafkd import DaFKD
from fedstill.methods.fedkf import FedKF
from fedstill.models import Classifier
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from fedstill.train.task import Samples, classifier
from support.play import averaged, epochs_of, kl, loaded, noted_targets, pairwise_diversity, stream
from support.quick import TINY
from support.recorder import Round
from support.runs import numbers
from support.wiretap import LR, descend, taped, without

pytestmark = pytest.mark.usefixtures("float64")

assert_equal = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)

NAMES = ["small", "deep"]
GROUPS: list[dict[str, Any]] = [
    {"name": "small", "model": "mlp", "model_options": {"hidden": [8]}},
    {"name": "deep", "model": "mlp", "model_options": {"hidden": [12, 10]}},
]
MIXED: dict[str, Any] = {k: v for k, v in TINY.items() if k not in ("model", "model_options")}
MIXED |= {"group": GROUPS, "rounds": 3, "participation": 1.0, "fraction": 0.05, "lr": LR}


def setup_of(method: str, **settings: Any) -> Setup:
    return prepare(resolve(MIXED | settings | {"method": method}))


def played(method: str, **settings: Any) -> tuple[Setup, list[dict[str, Round]]]:
    """What crossed in each round, by group."""
    _, tape = taped(method, **MIXED | settings)
    setup = setup_of(method, **settings)
    rounds: list[dict[str, Round]] = [{} for _ in range(MIXED["rounds"])]
    for crossed in tape:
        rounds[crossed.number - 1][setup.groups[setup.group_of[crossed.cohort[0]]].name] = crossed
    return setup, rounds


def network(group: Group, vector: Tensor) -> Classifier:
    net = group.task.build()
    net.load(vector)
    return classifier(net)


def samples_of(setup: Setup, client: int) -> tuple[Tensor, Tensor]:
    index, dataset = torch.from_numpy(setup.federation.train(client)), setup.federation.dataset
    return dataset.normalise(dataset.train.x[index]), dataset.train.y[index]


def orders(setup: Setup, client: int, round_: int) -> tuple[Tensor, ...]:
    n = len(setup.federation.train(client))
    parts: tuple[Tensor, ...] = torch.randperm(n, generator=stream("batches", round_, client)).split(16)
    return parts


# --- FedGKD -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1, 2])
def test_fedgkds_clients_learn_from_the_mean_logits_of_all_groups_teachers(buffer: int) -> None:
    setup, rounds = played("fedgkd", across=True, gamma=3.0, buffer=buffer)
    for t, crossed in enumerate(rounds):
        for group, other in zip(setup.groups, reversed(setup.groups), strict=True):
            own, theirs = f"teacher-{group.name}", f"teacher-{other.name}"
            down = crossed[group.name].down
            assert own not in down
            assert (theirs in down) == (t > 0), "who has not trained has nothing to teach"
            if not t:
                continue
            made = [before[other.name].down["model"] for before in rounds[1 : t + 1]]  # what rounds 1, 2, … made
            assert_equal(down[theirs], torch.stack(made[-buffer:]).mean(0))
            teachers = [network(group, down.get("teacher", down["model"])), network(other, down[theirs])]
            for k, up in crossed[group.name].up.items():
                net, (x, y) = network(group, down["model"]), samples_of(setup, k)
                for ids in orders(setup, k, t + 1):
                    with torch.no_grad():
                        logits = (teachers[0](x[ids]) + teachers[1](x[ids])) / 2
                    loss = F.cross_entropy(net(x[ids]), y[ids]) + 1.5 * kl(logits.softmax(1), net(x[ids]))
                    descend(net, loss, LR)
                assert_equal(torch.cat([p.detach().flatten() for p in net.parameters()]), up["model"])


@pytest.mark.parametrize(("method", "copies"), [("fedgkd", 2), ("fedkf", 2)])
def test_what_other_groups_teach_is_declared_and_counted(method: str, copies: int) -> None:
    own = {"width": 2, "z_dim": 3} if method == "fedkf" else {}
    result, tape = taped(method, **MIXED | own | {"across": True, "rounds": 2})
    setup = setup_of(method, across=True, **own)
    expected = [0, 0]
    for crossed in tape:
        group, other = (setup.groups[i] for i in ((0, 1) if setup.group_of[crossed.cohort[0]] == 0 else (1, 0)))
        wire = setup.method.wire(group.task)
        assert set(crossed.down) <= set(wire.down)
        assert wire.down[f"teacher-{other.name}"].shape == (other.task.size,)
        assert wire.down[f"teacher-{other.name}"].optional
        numbers = copies * group.task.size + (other.task.size if crossed.number > 1 else 0)
        expected[crossed.number - 1] += 8 * numbers * len(crossed.cohort)
        assert set(crossed.up[crossed.cohort[0]]) == {"model"}, "nothing more comes up"
    assert [record["bytes_down"] for record in result.records] == expected


# --- FedKF ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [GROUPS[1], GROUPS[0] | {"name": "deep"}], ids=["another network", "the same"])
@pytest.mark.parametrize("gen_first", [True, False])
def test_fedkfs_generator_and_student_see_the_groups_mean_logits_and_their_own_features(
    gen_first: bool, second: dict[str, Any]
) -> None:
    own_settings = {"across": True, "gamma": 0.7, "width": 2, "z_dim": 3, "gen_first": gen_first}
    setup = setup_of("fedkf", **own_settings, group=[GROUPS[0], second])
    (group, other), method = setup.groups, setup.method
    assert isinstance(method, FedKF)
    down = {
        "model": group.task.initial,
        "teacher": moved(group.task.initial),
        "teacher-deep": moved(other.task.initial) + 0.1,
    }
    index, dataset = torch.from_numpy(setup.federation.train(0)), setup.federation.dataset
    data = Samples(dataset.train.x, dataset.train.y, index, dataset.normalise)
    client = Client(group.task, 0, 2, data, down)
    judged: list[Outputs] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedKF, "generator_loss", noting(judged, FedKF.generator_loss))
        objective = method.prepare(client)
        ids = torch.arange(4)
        batch = Batch(data.x(ids), data.y[ids], ids)
        assert objective.inputs is not None
        assert objective.term is not None
        first = method.generator(group.task).inputs(torch.randn(4, 3, generator=client.stream("noise"))).detach()
        pictures = objective.inputs(batch)
        if objective.after is not None:
            objective.after(batch)
    own, theirs = network(group, down["teacher"]).eval(), network(other, down["teacher-deep"]).eval()
    with torch.no_grad():
        assert_equal(judged[0].logits.detach(), (own(first) + theirs(first)) / 2)
        assert_equal(judged[0].features.detach(), own.features(first))
        teachers = (own(pictures) + theirs(pictures)) / 2
    student = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    out = Outputs(student, student, Outputs(student, student))
    assert_equal(objective.term(batch, out), 0.7 * kl(teachers.softmax(1), student))


def moved(vector: Tensor) -> Tensor:
    return vector + 0.3 * torch.randn(len(vector), generator=torch.Generator().manual_seed(len(vector)))


def noting(seen: list[Outputs], original: Callable[[FedKF, Outputs], Tensor]) -> Callable[[FedKF, Outputs], Tensor]:
    def loss(self: FedKF, teacher_out: Outputs) -> Tensor:
        seen.append(teacher_out)
        return original(self, teacher_out)

    return loss


def test_fedkfs_teachers_are_the_means_of_each_groups_own_clients() -> None:
    """T1 stays inside a group."""
    _, rounds = played("fedkf", across=True, width=2, z_dim=3)
    for before, crossed in pairwise(rounds):
        for name, other in zip(NAMES, reversed(NAMES), strict=True):
            assert_equal(crossed[name].down["teacher"], averaged(before[name]))  # all clients are active
            assert torch.equal(crossed[name].down[f"teacher-{other}"], crossed[other].down["teacher"])


# --- DaFKD ------------------------------------------------------------------------------------------------------

SMALL_DAFKD: dict[str, Any] = {"z_dim": 4, "batches": 3, "server_batch": 8, "server_epochs": 1, "server_lr": 0.01}


@pytest.mark.parametrize("variant", ["full", "no-correlation"])
def test_dafkds_clients_of_all_networks_teach_each_student_by_their_own_discriminators(variant: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        targets = noted_targets(patch, "dafkd")
        setup, rounds = played("dafkd", variant=variant, lr=0.2, **SMALL_DAFKD)
    method = setup.method
    assert isinstance(method, DaFKD)
    _, second, third = rounds
    sent = [(group, up) for group in setup.groups for up in second[group.name].up.values()]
    generator = torch.stack([up["generator"] for _, up in sent]).mean(0)  # of all clients: Eq. 4
    for name in NAMES:
        assert_equal(third[name].down["generator"], generator)

    module, noise = loaded(TransposedGenerator((1, 16, 16), 4), generator), stream("pseudo set", 2)
    dataset = setup.federation.dataset
    with torch.no_grad():
        made = [module(torch.randn(8, 4, generator=noise)) for _ in range(3)]
    x = (torch.cat(made) - dataset.mean[0]) / dataset.std[0]
    weighted, total = torch.zeros(len(x), 10), torch.zeros(len(x), 1)
    for group, up in sent:
        net, alpha = network(group, up["model"]).eval(), torch.ones(len(x), 1)
        with torch.no_grad():
            if variant == "full":
                head = up["discriminator"]
                assert len(head) == group.task.feature_dim + 1
                alpha = torch.sigmoid(net.features(x) @ head[:-1] + head[-1]).unsqueeze(1)
            weighted += (alpha + 1e-8) * net(x).softmax(1)
        total += alpha + 1e-8
    assert len(targets) == 2 * len(NAMES)  # rounds 2 and 3, each student
    for found in targets[:2]:
        assert_equal(found, weighted / total)  # Eq. 7 and 8

    for group in setup.groups:
        student = network(group, averaged(second[group.name], uniform=True)).train()
        adam = torch.optim.Adam(student.parameters(), lr=0.01)
        where = (2, group.number) if group.number else (2,)
        for ids in epochs_of(len(x), 8, 1, stream("server: distillation", *where)):
            adam.zero_grad()
            kl((weighted / total)[ids], student(x[ids])).backward()
            adam.step()
        learnt = torch.cat([p.detach().flatten() for p in student.parameters()])
        assert_equal(third[group.name].down["model"], learnt, rtol=1e-7, atol=1e-9)


def test_one_generator_goes_from_group_to_group_also_where_a_group_was_not_drawn() -> None:
    settings = {**SMALL_DAFKD, "participation": 0.17, "rounds": 5, "fraction": 0.1}
    _, tape = taped("dafkd", **MIXED | settings)
    assert all(len(crossed.cohort) == 1 for crossed in tape)
    group_of = setup_of("dafkd", **settings).group_of
    assert len({group_of[crossed.cohort[0]] for crossed in tape}) == 2, "both groups have their rounds"
    for before, after in pairwise(tape):
        (up,) = before.up.values()
        assert torch.equal(after.down["generator"], up["generator"])


@pytest.mark.parametrize("setting", [("private", True), ("variant", "no-sharing")], ids=str)
def test_dafkds_other_variants_run_across_groups(setting: tuple[str, Any]) -> None:
    setup, rounds = played("dafkd", **SMALL_DAFKD | dict([setting]))
    for group in setup.groups:
        wire, crossed = setup.method.wire(group.task), rounds[1][group.name]
        assert all(tree.nbytes(up) == sum(part.nbytes for part in wire.up.values()) for up in crossed.up.values())
        start = averaged(crossed, uniform=True)
        assert not torch.allclose(rounds[2][group.name].down["model"], start), "its student has learnt"


# --- FedGen on a shared head ------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"model_options": {"feature_size": 6}, "hidden": 7, "z_dim": 5, "generator_batch": 6}
SHARED |= {"generator_steps": 4, "generator_lr": 0.01, "rounds": 3}
HEAD = 6 * 10 + 10


def feature_generator(vector: Tensor) -> FeatureGenerator:
    found: FeatureGenerator = loaded(FeatureGenerator(10, 6, 7, 5), vector)
    return found


def test_fedgens_generator_learns_from_the_heads_of_all_networks() -> None:
    """diversity + sum_k weight_k(y) CE(h_k(G(y)), y), as in one network; one generator for all groups."""
    _, tape = taped("lg-fedavg+fedgen", **MIXED | SHARED)
    generator = feature_generator(tape[0].down["feature_generator"])
    adam = torch.optim.Adam(generator.parameters(), weight_decay=1e-2)
    for crossed, following in pairwise(tape):
        assert {name: len(part) for name, part in crossed.up[0].items()} == {"head": HEAD, "counts": 10}
        assert len(crossed.cohort) == 6, "one downlink for clients of all networks"
        assert_equal(following.down["head"], averaged(crossed, "head"))
        adam.param_groups[0]["lr"] = 0.01 * 0.98 ** (crossed.number - 1)
        counts = torch.stack([up["counts"].double() for up in crossed.up.values()])
        shares = torch.where(counts.sum(0) > 0, counts / counts.sum(0).clamp(min=1), 1 / len(counts))
        rng = stream("server: generator", crossed.number)
        for _ in range(4):
            y, z = torch.randint(0, 10, (6,), generator=rng), torch.rand(6, 5, generator=rng)
            made = generator(z, y)
            loss = pairwise_diversity(z, made)
            for up, share in zip(crossed.up.values(), shares, strict=True):
                weight, bias = up["head"][:60].view(10, 6), up["head"][60:]
                loss = loss - (share[y] * (made @ weight.T + bias).log_softmax(1)[torch.arange(6), y]).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        found = feature_generator(following.down["feature_generator"]).state_dict()
        for name, tensor in generator.state_dict().items():
            assert_equal(found[name], tensor, rtol=1e-5, atol=1e-7)  # counts are float32


def test_fedgens_clients_of_every_network_learn_from_generated_features() -> None:
    strong = {"hyper": {"alpha": 2.0, "beta": 3.0}}
    setup = setup_of("lg-fedavg+fedgen", **SHARED | strong)
    _, tape = taped("lg-fedavg+fedgen", **MIXED | SHARED | strong | {"rounds": 2})
    own: dict[int, Tensor] = {}
    for crossed in tape:
        for k, up in crossed.up.items():
            group = setup.groups[setup.group_of[k]]
            net, (x, y) = network(group, own.get(k, group.task.initial)), samples_of(setup, k)
            weights = dict(net.head.named_parameters())
            with torch.no_grad():
                weights["weight"].copy_(crossed.down["head"][:60].view(10, 6))
                weights["bias"].copy_(crossed.down["head"][60:])
            rng, frozen = stream("generated", crossed.number, k), feature_generator(crossed.down["feature_generator"])
            frozen.eval()
            for ids in orders(setup, k, crossed.number):
                loss = F.cross_entropy(net(x[ids]), y[ids])
                if crossed.number > 1:
                    drawn = torch.randint(0, 10, (6,), generator=rng)
                    made = frozen(torch.rand(6, 5, generator=rng), drawn).detach()
                    teacher = net.head(frozen(torch.rand(len(ids), 5, generator=rng), y[ids])).softmax(1).detach()
                    both = 2 * F.cross_entropy(net.head(made), drawn) + 3 * kl(teacher, net(x[ids]))
                    loss = loss + 0.98 * both
                descend(net, loss, LR)
            own[k] = torch.cat([p.detach().flatten() for p in net.parameters()])
            assert_equal(up["head"], own[k][-HEAD:])


def test_fedgen_that_counts_for_nothing_is_lg_fedavg() -> None:
    nothing = SHARED | {"hyper": {"alpha": 0.0, "beta": 0.0}}
    plain = {"model_options": SHARED["model_options"]}
    (zero, _), (averaging, _) = (
        taped(name, **MIXED | own) for name, own in (("lg-fedavg+fedgen", nothing), ("lg-fedavg", plain))
    )
    assert without(numbers(zero), "bytes_down", "bytes_up") == without(numbers(averaging), "bytes_down", "bytes_up")
