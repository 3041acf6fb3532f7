"""How much work a round is, counted rather than timed, against what its method says it should take at most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.weights import FlatNet
from fedstill.distill.generators import ConditionalGenerator, FeatureGenerator, ImageGenerator, TransposedGenerator
from fedstill.methods import registry
from fedstill.methods.base import Part
from fedstill.metrics.records import RoundRecord
from fedstill.models import build
from fedstill.models.base import Stacked
from fedstill.running.callbacks import Callback, RunView
from support.quick import QUICK, needed
from support.recorder import Round, record_rounds
from support.runs import SMALL, slow

EPOCHS, CLIENTS, CLASSES = 3, 3, 10
SETTINGS: dict[str, Any] = SMALL | {"clients": CLIENTS, "participation": 1.0, "rounds": 4, "epochs": EPOCHS}
SETTINGS |= {"eval_every": 0, "model": "mlp", "model_options": {"hidden": [8]}, "regions": 1}
SHAPE = (1, 16, 16)
MADE = 8  # samples that DaFKD's server generates, in QUICK


# --- the most that a round may take -----------------------------------------------------------------------------------


def calls(net: nn.Module) -> int:
    """Layers that one pass through a network calls."""
    return sum(next(layer.children(), None) is None for layer in net.modules())


@dataclass(frozen=True)
class Size:
    """What the work of a round is made of."""

    clients: int
    epochs: int
    samples: int  # of all clients
    steps: int  # of all clients, in an epoch
    pool: int
    pool_steps: int  # at the clients' batch size
    depth: int  # layers
    method: Any

    @property
    def server_steps(self) -> int:
        """Of an epoch over the pool, where the method has a batch size for it."""
        return -(-self.pool // int(self.method.server_batch))


@dataclass(frozen=True)
class Work:
    """Counts of a round, as `counted` takes them."""

    trained_on: int = 0  # samples that a network sees in training, of clients and on the server
    asked: int = 0  # samples that a frozen network is asked about
    copies: int = 0  # of all weights of a network, into it or out of it
    layers: int = 0  # calls, those of generators and discriminators too

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.counts(), other.counts(), strict=True)))

    def counts(self) -> tuple[int, int, int, int]:
        return self.trained_on, self.asked, self.copies, self.layers


def local(at: Size) -> Work:
    """Clients load the model, see each of their samples once an epoch, and send the model."""
    return Work(at.epochs * at.samples, 0, 2 * at.clients, at.depth * at.epochs * at.steps)


def teachers(at: Size, count: int = 1) -> Work:
    """Frozen models on clients: asked once a sample, not once an epoch, in no more passes than training takes."""
    return Work(0, count * at.samples, count * at.clients, count * at.depth * at.steps)


def server_teachers(at: Size, count: int) -> Work:
    """The same on the server's samples."""
    return Work(0, count * at.pool, count, count * at.depth * at.pool_steps)


def distillation(at: Size, epochs: int, steps: int) -> Work:
    """The server's model sees its samples once an epoch."""
    return Work(epochs * at.pool, 0, 2, epochs * at.depth * steps)


def fedgkd_vote(at: Size) -> Work:
    """Two models of earlier rounds teach; the newest is checked on the pool."""
    return local(at) + teachers(at, 2) + server_teachers(at, 1)


def fedkf(at: Size) -> Work:
    """A step: teacher and generator learn from generated samples; made again, the student learns from both kinds."""
    steps, generator = at.epochs * at.steps, calls(ImageGenerator(SHAPE, 3, 2))
    seen = at.epochs * at.samples
    return local(at) + Work(2 * seen, seen, 3 * at.clients, steps * (2 * at.depth + 2 * generator))


def feddf(at: Size) -> Work:
    """Two steps over the pool, in QUICK."""
    return local(at) + server_teachers(at, at.clients) + distillation(at, 2, 1)


def votes(at: Size) -> Work:
    """As many teachers as clients, one after the other; then five epochs over the pool by default."""
    return local(at) + server_teachers(at, at.clients) + distillation(at, 5, at.pool_steps)


def dafkd(at: Size) -> Work:
    """A step: own and generated samples, told apart by one layer more; then the generator's turn with two at least."""
    steps, generator = at.epochs * at.steps, calls(TransposedGenerator(SHAPE, 3))
    adversarial = 2 * at.epochs * at.samples + at.epochs * at.clients
    clients = Work(adversarial, 0, 5 * at.clients, steps * (at.depth + 2 + 2 * generator))
    asked = Work(0, at.clients * MADE, 1 + 2 * at.clients, generator + at.clients * (at.depth + 1))
    return local(at) + clients + asked + Work(MADE, 0, 2, at.depth)


def fedhyb(at: Size) -> Work:
    """M sub-networks are trained beside the network."""
    subs: int = at.method.M
    clients = Work(subs * at.epochs * at.samples, layers=subs * at.depth * at.epochs * at.steps)
    server = server_teachers(at, at.clients) + distillation(at, at.method.server_epochs, at.server_steps)
    return local(at) + clients + server


def fedgen(at: Size) -> Work:
    """Generated features pass the classifier alone: twice a local step, and through all clients' a generator's step."""
    steps, generator = at.epochs * at.steps, calls(FeatureGenerator(CLASSES, 8, 256, 32))
    clients = Work(copies=at.clients, layers=steps * (2 + 2 * generator))
    return local(at) + clients + Work(0, 0, at.clients + 2, at.method.generator_steps * (generator + at.clients))


def fedftg(at: Size) -> Work:
    """Student and each client's model see what is generated against them; all then teach the student a step."""
    generator, size = calls(ConditionalGenerator(SHAPE, CLASSES, 3)), at.method.server_batch
    turns: int = at.method.iterations
    against = Work(2 * at.clients * size, 0, at.clients, at.clients * (generator + 2 * at.depth))
    taught = Work(size, at.clients * size, 0, generator + (at.clients + 1) * at.depth)
    assert turns == at.method.student_steps == 1
    return local(at) + against + taught + Work(copies=4)


def fedbe(at: Size) -> Work:
    """The average, the models drawn and the clients' teach."""
    drawn = 1 + at.method.samples + at.clients
    return local(at) + server_teachers(at, drawn) + distillation(at, at.method.server_epochs, at.server_steps)


def fedmd(at: Size) -> Work:
    """As many public samples as own ones in each step; then each client says what it makes of all of them."""
    own = Work(at.epochs * at.samples, copies=at.clients)
    return local(at) + own + server_teachers(at, at.clients)


def fedhkd(at: Size) -> Work:
    """Mean features pass the classifier in each step; the trained model is asked, without a copy."""
    asked = Work(0, at.samples, 0, at.depth * at.steps)
    return local(at) + asked + Work(layers=at.epochs * at.steps)


def creff(at: Size) -> Work:
    """Of the classifier alone: a pass for each class that is drawn, each step of matching and of training anew."""
    m = at.method
    drawn = Work(copies=at.clients, layers=at.clients * CLASSES * m.draws)
    retrained = m.retrain_epochs * -(-CLASSES * m.features // m.retrain_batch)
    return local(at) + teachers(at) + drawn + Work(copies=5, layers=m.match_steps + retrained)


def mtkd(at: Size) -> Work:
    return local(at) + server_teachers(at, at.clients) + distillation(at, at.method.server_epochs, at.server_steps)


def lkd(at: Size) -> Work:
    """The old model teaches too, and the new one, read for it, is compared with it in each epoch."""
    epochs: int = at.method.server_epochs
    return mtkd(at) + server_teachers(at, 1 + epochs) + Work(copies=epochs)


def fltrust(at: Size) -> Work:
    """The server trains as a client does."""
    return local(at) + Work(at.epochs * at.pool, 0, 2, at.depth * at.epochs * at.pool_steps)


def fedtgp(at: Size) -> Work:
    """As FedProto; then prototypes, at most one a class and client, are learnt in batches of ten: three layers."""
    steps = at.method.server_epochs * at.clients
    return local(at) + teachers(at) + Work(copies=2, layers=3 * (steps + 1))


def mutual(at: Size) -> Work:
    """A second network beside the first."""
    shared = calls(build("mlp", SHAPE, CLASSES))
    return local(at) + Work(at.epochs * at.samples, 0, 2 * at.clients, shared * at.epochs * at.steps)


def fedkd(at: Size) -> Work:
    """And a layer between their features."""
    return mutual(at) + Work(copies=2 * at.clients, layers=at.epochs * at.steps)


def dp_sgd(at: Size) -> Work:
    """Each sample is in a batch by chance: four standard deviations more than are expected."""
    return local(at) + Work(math.ceil(4 * math.sqrt(at.epochs * at.samples)))


MOST: dict[str, Callable[[Size], Work]] = {  # others do what FedAvg does: most modifiers add nothing
    "fedgkd": lambda at: local(at) + teachers(at),
    "fedgkd-vote": fedgkd_vote,
    "fedgkd-plus": lambda at: local(at) + teachers(at),
    "fedkf": fedkf,
    "moon": lambda at: local(at) + teachers(at, 2),
    "qffl": lambda at: local(at) + teachers(at),
    "fedproto": lambda at: local(at) + teachers(at),
    "fedtgp": fedtgp,
    "fml": mutual,
    "fedkd": fedkd,
    "feddf": feddf,
    "dafkd": dafkd,
    "fedhyb": fedhyb,
    "fedgen": fedgen,
    "fedftg": fedftg,
    "fedbe": fedbe,
    "fedmd": fedmd,
    "fedhkd": fedhkd,
    "creff": creff,
    "lkd": lkd,
    "mtkd": mtkd,
    "f2l": lkd,
    "fedavg+fltrust": fltrust,
    "fedavg+dp-sgd": dp_sgd,
    "fedavg+votes": votes,
}


# --- counting ---------------------------------------------------------------------------------------------------------


class Counting(Callback):
    """Counts by round."""

    def __init__(self) -> None:
        self.rounds = [Counter[str]()]
        self.crossed: list[Round] = []

    def add(self, what: str, count: int = 1) -> None:
        self.rounds[-1][what] += count

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self.rounds.append(Counter())


@contextmanager
def counted() -> Iterator[Counting]:
    seen = Counting()

    def count_layer(layer: nn.Module, _: Any) -> None:
        if next(layer.children(), None) is None:
            seen.add("layers")

    features, load, read = Stacked.features, FlatNet.load, FlatNet.read

    def count_features(self: Stacked, x: Tensor) -> Tensor:
        seen.add("trained on" if torch.is_grad_enabled() else "asked", len(x))
        return features(self, x)

    def count_load(self: FlatNet, vector: Tensor) -> None:
        seen.add("copies")
        load(self, vector)

    def count_read(self: FlatNet) -> Tensor:
        seen.add("copies")
        return read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stacked, "features", count_features)
        patch.setattr(FlatNet, "load", count_load)
        patch.setattr(FlatNet, "read", count_read)
        seen.crossed = record_rounds(patch)
        with register_module_forward_pre_hook(count_layer):
            yield seen


METHODS = [*registry.names(), *(f"fedavg+{name}" for name in registry.modifiers())]
ESSENTIAL = ("fedavg", "fedgkd", "feddf")  # plain, with a teacher on clients, with teachers on the server


@pytest.mark.slow
@pytest.mark.parametrize("method", [name if name in ESSENTIAL else slow(name) for name in METHODS])
def test_a_round_takes_no_more_work_than_its_method_says(method: str) -> None:
    settings = SETTINGS | QUICK.get(method, {}) | needed(method)
    with counted() as seen:
        fedstill.run(method, **settings, callbacks=[seen])
    (crossed,) = (round_ for round_ in seen.crossed if round_.number == 3)
    found = Work(*(seen.rounds[2][what] for what in ("trained on", "asked", "copies", "layers")))

    setup = prepare(resolve(settings, {"method": method}))
    batch, sizes, pool = settings["batch_size"], setup.federation.sizes, len(setup.federation.pool_index)
    steps, depth = int((-(-sizes // batch)).sum()), calls(setup.task.make_network())
    at = Size(CLIENTS, EPOCHS, int(sizes.sum()), steps, pool, -(-pool // batch), depth, setup.method)
    most = MOST.get(method, local)(at)
    assert found.trained_on >= at.epochs * at.samples, "the counter counts"
    assert all(a <= b for a, b in zip(found.counts(), most.counts(), strict=True)), f"{found} is more than {most}"

    wire = setup.method.wire(setup.task)
    assert len(crossed.up) == CLIENTS
    assert crossed.nbytes <= CLIENTS * (nbytes(wire.down) + nbytes(wire.up))


def nbytes(parts: dict[str, Part]) -> int:
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values())


def test_a_teacher_is_asked_once_a_sample_however_many_epochs_follow() -> None:
    def asked(epochs: int) -> int:
        with counted() as seen:
            fedstill.run("fedgkd", **SETTINGS | {"epochs": epochs}, callbacks=[seen])
        return seen.rounds[2]["asked"]

    held = int(prepare(resolve(SETTINGS, {"method": "fedgkd"})).federation.sizes.sum())
    assert asked(1) == asked(4) == held


def test_clients_that_are_tested_on_the_global_test_set_take_no_further_pass_over_it() -> None:
    data = fedstill.load_dataset("fashion-mini")
    federation = fedstill.federate(data, clients=4, fraction=0.1, alpha=0.5, local_test="matched")
    settings: dict[str, Any] = {"model": "mlp", "model_options": {"hidden": [8]}, "epochs": 1, "engine": "inline"}
    with counted() as seen:
        result = fedstill.run("fedavg", data=federation, participation=1.0, rounds=1, **settings, callbacks=[seen])
    local = int(federation.test_offsets[-1])  # each client measures the model it trained
    before = 2  # the first samples, when the run is prepared
    assert seen.rounds[0]["asked"] == before + local + len(data.test.y)
    with torch.no_grad():
        right = (result.model(data.normalise(data.test.x)).argmax(1) == data.test.y).double()
    accuracies = [float(right[federation.test(k)].mean()) for k in range(4)]
    assert result.records[-1]["amp"] == pytest.approx(float(right[federation.test_index].mean()))
    assert result.records[-1]["wlp"] == pytest.approx(min(accuracies))
