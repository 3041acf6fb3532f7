"""A client during one round: its data, its state, the network it trains, what the server sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedstill.core import device, seeds
from fedstill.core.tree import Message
from fedstill.core.weights import FlatNet
from fedstill.models.base import Classifier
from fedstill.train.evaluate import Outputs, load_for_evaluation, outputs, predict
from fedstill.train.loop import Batch, Fit, Objective, fit
from fedstill.train.task import Samples, Task, classifier

BUFFERS = "$buffers"  # in the state: BatchNorm's statistics that stay with the client


class Client:
    """What a method's client side works with."""

    def __init__(
        self,
        task: Task,
        id: int,
        round_: int,
        data: Samples,
        down: Message,
        read_state: Callable[[], dict[str, Any]] = dict,
        *,
        simulated: bool = True,
    ) -> None:
        self.task, self.id, self.round, self.data, self.down = task, id, round_, data, down
        self.simulated = simulated  # if not, there are others who know the seed
        self.flat: FlatNet = task.nets.get("student")
        self.trained: Fit | None = None
        self.notes: dict[str, Any] = {}  # what an objective leaves for the uplink; forgotten after the round
        self._read_state = read_state
        self._state: dict[str, Any] | None = None
        self._live_teachers = 0
        self.lr = task.local.lr_at(round_)

    @property
    def net(self) -> Classifier:
        """The network in training."""
        return classifier(self.flat)

    def receive(self) -> None:
        """Start from the weights that the server sent."""
        self.flat.load(self.down["model"])
        if self.task.buffers == "local" and BUFFERS in self.state:
            self.flat.load(torch.cat([self.down["model"][: self.flat.trainable], self.state[BUFFERS]]))

    @property
    def weights(self) -> Tensor:
        """A copy of the network's weights as they are now, to be sent.

        Buffers (BatchNorm's running statistics) are in it only if the policy is to average them.
        """
        weights = self.flat.read()
        if self.task.buffers != "average":
            weights[self.flat.trainable :] = self.down["model"][self.flat.trainable :]
        return weights

    @property
    def state(self) -> dict[str, Any]:
        """What this client keeps between its rounds: tensors, numbers, lists and dicts. Empty at first."""
        if self._state is None:
            self._state = self._read_state()
        return self._state

    @property
    def touched_state(self) -> dict[str, Any] | None:
        """The state if the method used it, else None."""
        return self._state

    def rng(self, purpose: str) -> torch.Generator:
        """A random stream for one purpose of this client in this round: never one that the library draws from."""
        return self.stream(f"own: {purpose}")

    def stream(self, purpose: str) -> torch.Generator:
        """The library's own streams; a method declares those it draws from in `streams`."""
        return seeds.torch_rng(self.task.seed, purpose, self.round, self.id)

    def fit(self, objective: Objective) -> Fit:
        """Train the network on the local data."""
        # Layers that draw for themselves (dropout) use PyTorch's global stream.
        device.seed_layers(seeds.key(self.task.seed, "layers", self.round, self.id))
        done = fit(
            self.flat,
            self.data,
            objective,
            self.task.local,
            lr=self.lr,
            order=self.stream("batches"),
            augment=self.task.augment,
            changes=self.stream("augment") if self.task.augment else None,
        )
        return self.trained_by(done)

    def trained_by(self, done: Fit) -> Fit:
        """Training is over: note what it came to, and keep statistics that stay with the client."""
        self.trained = done
        if self.task.buffers == "local":
            self.state[BUFFERS] = self.flat.read()[self.flat.trainable :].clone()
        return done

    def teacher(self, weights: Tensor, task: Task | None = None) -> Callable[[Batch], Outputs]:
        """The outputs of a frozen network, the client's or that of another group's task, on any batch of its data.

        Without augmentation each sample is evaluated once, however many epochs follow; with it (or when only a
        part of the data will be drawn) the teacher sees each batch as it comes.
        """
        if self.task.augment is None and self.task.local.drawn(len(self.data)) >= len(self.data):
            known = predict(task or self.task, weights, self.data)
            return lambda batch: Outputs(known.logits[batch.ids], known.features[batch.ids])
        self._live_teachers += 1
        frozen = load_for_evaluation(task or self.task, weights, role=f"live teacher {self._live_teachers}")

        @torch.no_grad()
        def live(batch: Batch) -> Outputs:
            return outputs(classifier(frozen), batch.x)

        return live
