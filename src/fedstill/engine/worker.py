"""The client's side of a run: a worker can do the work of any client in a round."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedstill.attacks.attack import Attack
from fedstill.core import device, seeds
from fedstill.core.arrays import IntArray
from fedstill.core.device import to_current_device
from fedstill.core.errors import FedstillError
from fedstill.core.store import Store
from fedstill.core.tree import Message, Tree
from fedstill.data.federation import Federation
from fedstill.methods.base import Method, fault
from fedstill.models.base import Wrapped
from fedstill.train.client import Client
from fedstill.train.evaluate import EVAL_BATCH, logits, score
from fedstill.train.loop import Objective
from fedstill.train.task import Samples, Task
from fedstill.train.together import can_be_joint, fit_together

Source = Literal["test", "local", "validation"]


@dataclass(frozen=True)
class Train:
    """Ask a client to train. `measure`: also report how its own model does on its own test data."""

    client: int
    round: int
    measure: bool = False
    region: int = 0
    state: int = 0  # of a client elsewhere: the round whose state it has, by its last answer that counted


@dataclass(frozen=True)
class FinalExchange:
    """Ask a client for its final uplink, on the final model."""

    client: int
    round: int
    state: int = 0


@dataclass(frozen=True)
class Score:
    """Ask for loss and prediction on samples start to stop of the test set, or of all local test or validation sets.

    `probabilities`: and for the probability of each class.
    """

    source: Source
    start: int
    stop: int
    probabilities: bool = False
    region: int = 0  # or group, whose network it is


Request = Train | FinalExchange | Score
T = TypeVar("T")
# By the names that requests have on the wire and in audit logs.
_KINDS: dict[str, type[Request]] = {kind.__name__: kind for kind in (Train, FinalExchange, Score)}


def kind_of(request: Request) -> str:
    """The name of its kind on the wire."""
    return type(request).__name__


def request_fields(request: Request) -> dict[str, Any]:
    """A request as plain values: its fields and its `kind`."""
    return {"kind": kind_of(request), **vars(request)}


def request_from(fields: Mapping[str, Any]) -> Request:
    """The request that `request_fields` describes."""
    values = dict(fields)
    return _KINDS[values.pop("kind")](**values)


def encode_answer(work: Callable[[], Tree], encode: Callable[[Tree], T]) -> T:
    """What work gives, or what it raises, as something to send back."""
    try:
        return encode({"answer": work()})
    except FedstillError as error:
        return encode({"error": str(error)})
    except OSError as error:
        if not error.filename:  # what it was about is only to be seen in the code
            return encode({"error": f"client work failed:\n{traceback.format_exc()}"})
        return encode({"error": f"{error.filename}: {error.strerror or error}"})
    except Exception:  # noqa: BLE001 - whatever a user's method raises is carried to the caller
        return encode({"error": f"client work failed:\n{traceback.format_exc()}"})


@dataclass(frozen=True)
class Worker:
    """Carries out requests; holds nothing that changes between them but reusable networks."""

    task: Task
    federation: Federation
    method: Method
    store: Store
    regional: tuple[tuple[Task, Method], ...] = ()  # how the clients of each region, or group, train
    attack: Attack = Attack()  # noqa: RUF009 - it cannot change
    together: int = 1  # clients of one size that are trained at once, at most
    simulated: bool = True  # if not, what must be secret may not follow from the seed

    def handle(self, request: Request, down: Message) -> Tree:
        """Carry out a request with the downlink of the server. The answer is data, ready for any wire."""
        down = {name: to_current_device(part) for name, part in down.items()}
        if isinstance(request, Score):
            x, y = self._stored(request)
            task = self.regional[request.region][0] if self.regional else self.task
            return score(task, down["model"], x, y, probabilities=request.probabilities)
        if isinstance(request, Train) and self.regional:
            task, method = self.regional[request.region]
            return replace(self, task=task, method=method, regional=()).handle(request, down)
        began, client = time.perf_counter(), self._client(self.task, request, down)
        if isinstance(request, FinalExchange):
            client.receive()
            return {"samples": len(client.data), "message": self.method.final_uplink(client), "metrics": {}}
        objective = self._begin(client)
        client.fit(objective)
        return self._end(client, request, began)

    def grouped(self, requests: Sequence[Request]) -> list[list[Request]]:
        """The requests, in their order, in groups that are worked on at once: clients of one size and region."""
        groups: list[list[Request]] = []
        for request in requests:
            if groups and len(groups[-1]) < self.together and self._alike(groups[-1][0], request):
                groups[-1].append(request)
            else:
                groups.append([request])
        return groups

    def describe(self, requests: Sequence[Request]) -> str:
        """Whose work it is, and through which network."""
        first = requests[0]
        if isinstance(first, Score):
            work = f"the evaluation of samples {first.start} to {first.stop - 1}"
        else:
            clients = ", ".join(str(request.client) for request in requests if not isinstance(request, Score))
            work = f"client{'s' * (len(requests) > 1)} {clients} in round {first.round}"
        module = self.task.nets.get("student").module
        network = module.module if isinstance(module, Wrapped) else module
        return f"{work}, network {self.task.model} ({type(network).__name__}),"

    def _alike(self, a: Request, b: Request) -> bool:
        if not (isinstance(a, Train) and isinstance(b, Train) and a.region == b.region):
            return False
        return len(self.federation.train(a.client)) == len(self.federation.train(b.client))

    def handle_group(self, requests: Sequence[Request], down: Message) -> list[Tree]:
        """The answers to a group of requests."""
        training = [request for request in requests if isinstance(request, Train)]
        if len(requests) == 1 or len(training) < len(requests):
            return [self.handle(request, down) for request in requests]
        task, method = self.regional[training[0].region] if self.regional else (self.task, self.method)
        return replace(self, task=task, method=method, regional=())._train_together(training, down)

    def _train_together(self, requests: Sequence[Train], down: Message) -> list[Tree]:
        down = {name: to_current_device(part) for name, part in down.items()}
        began, (rows, tasks) = time.perf_counter(), self.task.replicas(len(requests))
        clients = [self._client(task, request, down) for task, request in zip(tasks, requests, strict=True)]
        objectives = [self._begin(client) for client in clients]
        joint = can_be_joint(objectives)
        if joint:
            fit_together(rows, clients, objectives)
        answers, share = [], (time.perf_counter() - began) / len(clients)
        for client, objective, request in zip(clients, objectives, requests, strict=True):
            began = time.perf_counter()
            if not joint:
                client.fit(objective)
            answers.append(self._end(client, request, began - share))
        return answers

    def _client(self, task: Task, request: Train | FinalExchange, down: Message) -> Client:
        dataset, index = self.task.dataset, torch.from_numpy(self.federation.train(request.client))
        labels = self.attack.labels(request.client, dataset.train.y)
        # To a GPU a client's samples are moved at once.
        again = task.local.drawn(len(index)) > len(index) or device.current() != device.CPU
        return Client(
            task,
            request.client,
            request.round,
            Samples(dataset.train.x, labels, index, dataset.normalise, again=again),
            down,
            read_state=lambda: self.store.read(request.client, before=request.round) or {},
            simulated=self.simulated,
        )

    def _begin(self, client: Client) -> Objective:
        """What a client is to minimise, with its network at the weights to start from."""
        # For code that draws from PyTorch's global stream without asking for one of its own.
        device.seed_layers(seeds.key(self.task.seed, "global stream", client.round, client.id))
        return self.method.prepare(client)

    def _end(self, client: Client, request: Train, began: float) -> dict[str, Any]:
        """The answer of a client that has trained; it began at this moment of the clock."""
        message, declared = self.method.uplink(client), self.method.wire(self.task).up
        samples = len(client.data)
        if self.attack.on_updates and client.id in self.attack.clients and fault(message, declared) is None:
            message, samples = self.attack.forged(
                message, samples, client.down["model"], client.flat, client.stream("attack")
            )
        # A client whose answer the server will drop keeps the state it had.
        if client.touched_state and fault(message, declared) is None:
            self.store.write(request.client, request.round, client.touched_state)
        guarantee = self.method.guarantee
        private = guarantee is not None  # then what is measured on a client's samples stays with it
        metrics = {"train_loss": client.trained.loss} if client.trained and not private else {}
        metrics["seconds"] = time.perf_counter() - began
        # Where clients are protected and have the only models, a simulation measures these, and says: not covered.
        alone = guarantee is not None and guarantee.unit == "client" and not self.method.global_model
        if request.measure and (not private or (alone and self.simulated)):
            metrics |= self._own_model(client)
        return {"samples": samples, "message": message, "metrics": metrics}

    @torch.no_grad()
    def _own_model(self, client: Client) -> dict[str, float]:
        """How the client's own model, as trained in this round, does on its own test data.

        Where there is no global model, also how it does on the global test set.
        """
        client.net.eval()
        split, index = self.federation.test_split, torch.from_numpy(self.federation.test(client.id))
        test = Samples(split.x, split.y, index, self.task.dataset.normalise)
        metrics = {}
        if len(test):
            predicted = torch.cat([logits(client.net, x).argmax(1) for x in test.parts(EVAL_BATCH)])
            metrics["local_accuracy"] = float((predicted == test.y).double().mean())
        if not self.method.global_model:
            split = self.task.dataset.test
            found = score(self.task, client.flat.read(), split.x, split.y)
            metrics["test_accuracy"] = float((found["predicted"] == to_current_device(split.y)).double().mean())
            metrics["test_loss"] = float(found["loss"].double().mean())
            if self.federation.validation is not None and len(held := self.federation.validation.of(client.id)):
                x, y = self._training_samples(held)
                found = score(self.task, client.flat.read(), x, y)
                metrics["val_accuracy"] = float((found["predicted"] == to_current_device(y)).double().mean())
        return metrics

    def _stored(self, request: Score) -> tuple[Tensor, Tensor]:
        where = slice(request.start, request.stop)
        if request.source == "test":
            return self.task.dataset.test.x[where], self.task.dataset.test.y[where]
        if request.source == "validation":
            held = self.federation.validation
            assert held is not None
            return self._training_samples(held.samples[where])
        split, index = self.federation.test_split, torch.from_numpy(self.federation.test_index[where])
        return split.x[index], split.y[index]

    def _training_samples(self, index: IntArray) -> tuple[Tensor, Tensor]:
        split, chosen = self.task.dataset.train, torch.from_numpy(index)
        return split.x[chosen], split.y[chosen]
