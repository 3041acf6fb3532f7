"""What server and clients agree on before the first round: the network, the data's shape, how clients train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedstill.core import seeds
from fedstill.core.choices import BufferPolicy, Precision
from fedstill.core.device import CPU, current, on, to_current_device
from fedstill.core.weights import FlatNet
from fedstill.data.augment import Augmentation
from fedstill.data.dataset import Dataset
from fedstill.models.base import Classifier
from fedstill.models.norms import drop_statistics, norms


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: the same for every method."""

    epochs: int = 5
    batch_size: int = 32
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05
    lr_decay: float = 1.0  # the rate of round t is lr * lr_decay^(t-1)
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay_norms: bool = True  # whether weight decay reaches normalisation layers
    clip: float = 0.0  # largest gradient norm; 0: no clipping
    cosine: bool = False  # let the rate fall to 0 along a cosine, within the round
    steps_per_epoch: int = 0  # the same number for every client; 0: one pass over the client's own data
    class_weight: tuple[float, ...] = ()  # how much a sample of each class counts in the cross-entropy; empty: alike

    def lr_at(self, round_: int) -> float:
        """The learning rate of a round."""
        return self.lr * self.lr_decay ** (round_ - 1)

    def drawn(self, n: int) -> int:
        """How many samples the steps of a round take from n: more than n, and some are taken again."""
        return self.epochs * (self.steps_per_epoch * self.batch_size or n)


@dataclass(frozen=True)
class Task:
    """The learning problem that all clients share."""

    dataset: Dataset
    make_network: Callable[[], Classifier]
    local: LocalTraining = field(default_factory=LocalTraining)
    augment: Augmentation | None = None
    buffers: BufferPolicy = "average"
    seed: int = 0
    precision: Precision = "float32"  # of passes through the network; weights and losses are never in a lower one
    model: str = "of your own"  # what the settings call the network
    proxy: Samples | None = None  # unlabelled samples that nobody minds sharing, for methods that need them
    group: str = ""  # where clients have different networks: what those that have this one are called
    others: tuple[Task, ...] = field(default=(), compare=False, repr=False)  # and the tasks of the other groups

    @cached_property
    def nets(self) -> Nets:
        """Networks to load weights into, kept for reuse. One set for each process."""
        return Nets(self.build)

    @property
    def initial(self) -> Tensor:
        """The weights that every run with this seed starts from."""
        return to_current_device(self._initial)

    @cached_property
    def _initial(self) -> Tensor:
        return self.build().read()

    def build(self, purpose: str = "initial weights") -> FlatNet:
        """A network with weights drawn for a purpose: by default those that the run starts from."""

        def make() -> FlatNet:
            net = self.make_network()
            net.precision = torch.bfloat16 if self.precision == "bfloat16" else None
            return FlatNet(net)

        return self.seeded(purpose, make)

    def seeded(self, purpose: str, make: Callable[[], FlatNet]) -> FlatNet:
        """A network whose own random initialisation depends on the seed and the purpose alone, not on the device."""
        with on(CPU), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.key(self.seed, purpose))
            net = make()
        return net.to(current())

    def trained_as(self, local: LocalTraining) -> Task:
        """The same task with clients that train in another way; networks are shared."""
        return replace(self, local=local)._with(self.nets, self._initial)

    def replicas(self, count: int) -> tuple[Tensor, list[Task]]:
        """The same task for each of several clients at once, with networks of its own.

        The weights that they train are the rows of the matrix.
        """
        rows, sets = self.nets.replicas(count)
        return rows, [replace(self)._with(nets, self._initial) for nets in sets]

    def named(self, group: str) -> Task:
        """The same task as that of a group; networks are shared."""
        return replace(self, group=group)._with(self.nets, self._initial)

    def beside(self, others: tuple[Task, ...]) -> None:
        """Let it know the other groups' tasks, which know this one."""
        self.__dict__["others"] = others

    def _with(self, nets: Nets, initial: Tensor) -> Task:
        self.__dict__.update(nets=nets, _initial=initial)
        return self

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.dataset.classes)

    @property
    def size(self) -> int:
        """Length of the network's weight vector."""
        return self.nets.get("student").size

    @property
    def trainable(self) -> int:
        """How many of the weights are trained; they come first in the vector."""
        return self.nets.get("student").trainable

    @property
    def feature_dim(self) -> int:
        """Width of the network's penultimate features."""
        return classifier(self.nets.get("student")).feature_dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network's weight vector."""
        return self.nets.get("student").vector.dtype

    def use_batch_statistics(self, module: nn.Module) -> None:
        """Let BatchNorm normalise by the batch when the global model carries no running statistics."""
        if self.buffers == "average":
            return
        for layer in norms(module):
            layer.train()
            layer.momentum = 0.0  # and leave the running statistics as they are

    def without_statistics(self, module: nn.Module) -> nn.Module:
        """A network as it is evaluated: without running statistics, unless they are averaged."""
        if self.buffers != "average":
            drop_statistics(module)
        return module


class Nets:
    """One network for each role (`student`, `teacher`, …), made when first used and loaded anew each time.

    Each is there once for every device that asks.
    """

    def __init__(self, build: Callable[[], FlatNet]) -> None:
        self._build = build
        self._nets: dict[tuple[str, torch.device], FlatNet] = {}
        self._replicas: dict[torch.device, tuple[Tensor, list[Nets]]] = {}

    def get(self, role: str, build: Callable[[], FlatNet] | None = None) -> FlatNet:
        key = role, current()
        if key not in self._nets:
            self._nets[key] = (build or self._build)()
        return self._nets[key]

    def replicas(self, count: int) -> tuple[Tensor, list[Nets]]:
        """Further sets, and a matrix whose rows are the weights of their students."""
        rows, sets = self._replicas.get(current(), (torch.empty(0), []))
        if len(sets) < count:
            students = [self._build() for _ in range(count)]
            rows, sets = torch.stack([net.vector for net in students]), [Nets(self._build) for _ in students]
            for nets, net, row in zip(sets, students, rows, strict=True):
                nets._nets["student", current()] = FlatNet(net.module, row)
            self._replicas[current()] = rows, sets
        return rows[:count], sets[:count]


def classifier(net: FlatNet) -> Classifier:
    """The network itself, typed."""
    assert isinstance(net.module, Classifier)
    return net.module


class Samples:
    """Inputs and labels of one holder. Small sets are prepared (gathered, normalised) once, large ones when used.

    What is stored stays where it is; what is prepared is on the device that works with it. `again`: whether samples
    will be used more than once, so that it is worth keeping them prepared.
    """

    PREPARE_UP_TO = 1 << 26  # numbers, i.e. 256 MB as float32

    def __init__(
        self, x: Tensor, y: Tensor, index: Tensor, prepare: Callable[[Tensor], Tensor], *, again: bool = True
    ) -> None:
        self._stored, self._labels, self._index, self._prepare = x, y, index.to(x.device), prepare
        small = len(index) * x[:1].numel() <= self.PREPARE_UP_TO
        self._y = to_current_device(y[self._index])
        self._ready = self._gather(self._index) if small and again else None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def y(self) -> Tensor:
        """Labels."""
        self._come()
        return self._y

    def take(self, ids: Tensor) -> Samples:
        """Some of the samples, by their places among these."""
        return Samples(self._stored, self._labels, self._index[ids.to(self._index.device)], self._prepare)

    def x(self, ids: Tensor) -> Tensor:
        """Prepared inputs of these samples."""
        self._come()
        if self._ready is not None:
            return self._ready[ids]
        return self._gather(self._index[ids.to(self._index.device)])

    def _gather(self, index: Tensor) -> Tensor:
        return self._prepare(to_current_device(self._stored[index]))

    def _come(self) -> None:
        """Move what is ready to where it is needed: some samples are gathered before a run begins."""
        if self._y.device != current():
            self._y = to_current_device(self._y)
            self._ready = None if self._ready is None else to_current_device(self._ready)

    def parts(self, size: int) -> Iterator[Tensor]:
        """All prepared inputs in order, in nearly equal pieces of at most `size`."""
        for ids in torch.arange(len(self)).tensor_split(max(1, -(-len(self) // size))):
            yield self.x(ids)
