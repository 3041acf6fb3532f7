"""Runs with a tap on the wire, and the plain pieces from which tests work out what should have crossed it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core import seeds, tree
from fedstill.core.tree import Message
from fedstill.core.weights import FlatNet
from fedstill.methods.base import Method, Part
from fedstill.models import Classifier, build
from fedstill.models.heads import Projected
from fedstill.running.directory import RunDirectory
from fedstill.running.result import Result
from fedstill.train.task import Samples
from support.recorder import Round, record_rounds
from support.runs import SMALL

Floats = NDArray[np.float64]
LR, BATCH = 0.05, 16


def taped(method: str | Method, **settings: Any) -> tuple[Result, list[Round]]:
    """A small run, and everything that crossed between its server and its clients."""
    with pytest.MonkeyPatch.context() as patch:
        tape = record_rounds(patch)
        result = fedstill.run(method, **(SMALL | {"lr": LR, "eval_every": 0, "checkpoint_every": 1000} | settings))
    return result, tape


def setup_of(method: str, **settings: Any) -> Setup:
    """What a small run of this method is made of."""
    return prepare(resolve(SMALL | {"lr": LR} | settings | {"method": method}))


def local_round(method: Method, client: fedstill.Client) -> Message:
    """A client's whole round."""
    client.fit(method.prepare(client))
    return method.uplink(client)


def client_of(
    setup: Setup, id: int, round_: int, down: Message, state: dict[str, Any] | None = None
) -> fedstill.Client:
    """One client at the start of its round."""
    dataset, index = setup.federation.dataset, torch.from_numpy(setup.federation.train(id))
    data = Samples(dataset.train.x, dataset.train.y, index, dataset.normalise)
    return fedstill.Client(setup.task, id, round_, data, down, read_state=lambda: dict(state or {}))


def assert_as_declared(method: str, tape: list[Round], **settings: Any) -> None:
    """Every message has the parts that `wire` declares, by name, shape and dtype."""
    setup = setup_of(method, **settings)
    wire = setup.method.wire(setup.task)

    def check(message: Message, declared: dict[str, Part]) -> None:
        needed = {name for name, part in declared.items() if not part.optional}
        assert needed <= set(message) <= set(declared)
        for name, tensor in message.items():
            assert (tuple(tensor.shape), tensor.dtype) == (declared[name].shape, declared[name].dtype), name

    assert tape
    for crossed in tape:
        check(crossed.down, wire.down)
        for message in crossed.up.values():
            check(message, wire.up)


def model_copies(message: Message) -> int:
    """How many whole networks a message holds."""
    return sum(len(tensor) == len(max(message.values(), key=len)) for tensor in message.values() if tensor.dim() == 1)


# --- the same learning problem, without the library's loop ------------------------------------------------------


@cache
def _federation() -> fedstill.Federation:
    dataset = fedstill.load_dataset("fashion-mini", image_size=SMALL["image_size"])
    return fedstill.federate(
        dataset, clients=SMALL["clients"], seed=0, alpha=SMALL["alpha"], fraction=SMALL["fraction"]
    )


def normalised(x: Tensor) -> Tensor:
    """Stored images as a network sees them."""
    dataset = _federation().dataset
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (dataset.mean, dataset.std))
    return (x.to(torch.get_default_dtype()) / 255 - mean) / std


@cache
def held_by(client: int) -> tuple[Tensor, Tensor]:
    """The samples that a client of a small run trains on."""
    index = torch.from_numpy(_federation().train(client))
    return normalised(_federation().dataset.train.x[index]), _federation().dataset.train.y[index]


def global_test() -> tuple[Tensor, Tensor]:
    """The global test set."""
    return normalised(_federation().dataset.test.x), _federation().dataset.test.y


def network(vector: Tensor, *, head: bool = False) -> Classifier:
    """The small run's network with these weights, in ordinary layout; `head`: with the projection head."""
    net = build(SMALL["model"], (1, SMALL["image_size"], SMALL["image_size"]), 10)
    net = Projected(net) if head else net
    net.load_state_dict(FlatNet(copy.deepcopy(net)).unflatten(vector))
    return net


def batch_ids(client: int, round_: int, epochs: int = 1) -> Iterator[Tensor]:
    """The samples of each local step: the same for every method."""
    order = seeds.torch_rng(0, "batches", round_, client)
    for _ in range(epochs):
        yield from torch.randperm(len(held_by(client)[1]), generator=order).split(BATCH)


def descend(net: nn.Module, loss: Tensor, lr: float = LR) -> None:
    """One step of plain gradient descent."""
    params = list(net.parameters())
    with torch.no_grad():
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.sub_(lr * grad)


Extra = Callable[[Classifier, Tensor, Tensor], Tensor]
"""A loss of the network in training, a batch and its labels, to be added to the cross-entropy."""


def trained(start: Tensor, client: int, round_: int, extra: Extra | None = None, *, head: bool = False) -> Classifier:
    """What a client's round should come to, by a plain loop."""
    net, (x, y) = network(start, head=head), held_by(client)
    for ids in batch_ids(client, round_):
        loss = F.cross_entropy(net(x[ids]), y[ids])
        descend(net, loss + extra(net, x[ids], y[ids]) if extra else loss)
    return net


def assert_same_network(actual: Tensor, expected: Classifier, *, head: bool = False, atol: float = 1e-5) -> None:
    """A weight vector holds this network, to the rounding of float32."""
    found = network(actual, head=head).state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=atol)


class Headed(fedstill.FedAvg):
    """FedAvg on the network with the projection head."""

    def network(self, net: Classifier) -> Classifier:
        return Projected(net)


# --- the formulas, in float64 -----------------------------------------------------------------------------------


def softmax(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(-1, keepdims=True))


def kl_divergence(teacher: Floats, student: Floats) -> Floats:
    """KL(softmax(teacher) || softmax(student)) of each row."""
    p, q = softmax(teacher), softmax(student)
    return np.asarray((p * (np.log(p) - np.log(q))).sum(-1))


def exact(net: Classifier, x: Tensor) -> tuple[Floats, Floats]:
    """Logits and features in float64, in evaluation mode."""
    double = copy.deepcopy(net).double().eval()
    with torch.no_grad():
        features = double.features(x.double())
        return double.head(features).numpy(), features.numpy()


# --- what a run keeps -------------------------------------------------------------------------------------------


def client_states(path: Path) -> dict[int, dict[str, Any]]:
    """The state of every client that has one."""
    store = RunDirectory(path).client_store
    states = {k: store.read(k, before=10**9) for k in range(SMALL["clients"])}
    return {k: state for k, state in states.items() if state is not None}


def assert_same_tree(ours: tree.Tree, theirs: tree.Tree) -> None:
    """Two trees hold the same bits."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for name, node in ours.items():
            assert_same_tree(node, theirs[name])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same_tree(a, b)
    else:
        assert ours == theirs


def without(records: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Records less some of their numbers."""
    return [{k: v for k, v in record.items() if k not in names} for record in records]


def resumed_after_every_round(method: str, path: Path, rounds: int, **settings: Any) -> Result:
    """A run stopped and continued after each of its rounds."""
    result = fedstill.run(method, **(SMALL | {"lr": LR} | settings | {"rounds": 1, "out": path}))
    for so_far in range(2, rounds + 1):
        result = fedstill.resume(path, rounds=so_far)
    return result
