"""Membership inference on what crosses between a client and its server: weights, class means, generators.

What crosses is that of the round that would follow the run: nothing of it has to be kept by the run for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.building.setup import Setup
from fedstill.core.arrays import IntArray
from fedstill.core.store import Store
from fedstill.core.tree import Message
from fedstill.data.dataset import Split
from fedstill.engine.worker import Train, Worker
from fedstill.methods.base import Method, Part, Server, Uplink
from fedstill.methods.kinds import Kind
from fedstill.methods.summed import averaged
from fedstill.privacy.membership import Floats, confidence_logits
from fedstill.train.evaluate import Outputs, predict, score
from fedstill.train.task import Samples, Task

_PICTURES = 512  # of a client's generator
Seen = tuple[str, str, Floats, Floats]  # what was seen, the attack, and scores of members and of others


@dataclass(frozen=True)
class Exchanged:
    """What a server and some of its clients send each other in a round."""

    task: Task
    method: Method
    round: int
    down: Message
    up: dict[int, Message]
    states: dict[int, dict[str, Any]]  # what each client keeps
    masked: bool  # whether the server sees no more than the mean of what is sent

    @property
    def clients(self) -> list[int]:
        return list(self.up)

    def messages(self) -> list[tuple[list[int], Message]]:
        """What the server sees, and whose it is."""
        if not self.masked:
            return [([client], message) for client, message in self.up.items()]
        uplinks = (Uplink(client, 1, message) for client, message in self.up.items())
        mean = next(averaged(uplinks, self.method.wire(self.task).up))
        return [(self.clients, mean.message)]

    @classmethod
    def next_round(
        cls, setup: Setup, regional: Mapping[int, Server], store: Store, scratch: Store, owners: IntArray, most: int
    ) -> Exchanged:
        """The round after the last, of the clients with the most samples that are looked at.

        `regional` are the servers, `store` the clients' states as they are, `scratch` takes what they become.
        """
        counts = np.bincount(owners, minlength=setup.federation.clients)
        region = max(setup.hierarchy.regions, key=lambda each: int(counts[each.clients].sum()))
        server, method = regional[region.number], region.method
        server.round = round_ = server.round + 1
        method.begin(server)
        down = method.downlink(server)
        largest = region.clients[np.argsort(-counts[region.clients], kind="stable")][:most]
        up, states = {}, {}
        worker = Worker(region.task, setup.federation, method, scratch)
        for client in sorted(int(k) for k in largest if counts[k]):
            if (state := store.read(client, before=round_)) is not None:
                scratch.write(client, round_ - 1, state)
            up[client] = worker.handle(Train(client, round_), down)["message"]
            states[client] = scratch.read(client, before=round_ + 1) or {}
        return cls(region.task, method, round_, down, up, states, setup.config.secure_aggregation)


def on_the_wire(exchanged: Exchanged, samples: Split, owners: IntArray) -> tuple[list[Seen], list[str]]:
    """Attacks on each part of the messages, and the parts for which there is none.

    The first half of the samples are members, of these `owners`; the others are their pairs.
    """
    wire = exchanged.method.wire(exchanged.task)
    found: list[Seen] = []
    notes = []
    for name, part in wire.up.items():
        sent = all(name in message for message in exchanged.up.values())
        seen = _attacked(exchanged, name, part, samples, owners) if sent else None
        if seen is None:
            notes.append(f"{name!r} ({part.what}) was not attacked: no membership attack on it is known here")
        else:
            found.append(seen)
    return found, notes


Scores = Callable[[Message, Split], Floats]
"""How much each sample looks like one that a client trained on, by what it sent."""


def _attacked(exchanged: Exchanged, name: str, part: Part, samples: Split, owners: IntArray) -> Seen | None:
    """An attack on one part of what is sent, if there is one."""
    whose = "all clients, averaged" if exchanged.masked else "a client"
    has_model = "model" in exchanged.down
    if name == "model" and has_model:
        seen, attack, scores = "weights", "loss against the sent model's", _by_weights(exchanged)
    elif part.kind is Kind.GENERATOR and name == "generator" and _shows_pictures(exchanged):
        seen, attack, scores = "generator", "nearest picture", _by_pictures(exchanged)
    elif part.kind is Kind.GENERATOR and name == "discriminator" and _has_discriminator(exchanged):
        seen, attack, scores = "discriminator", "taken for real", _by_discriminator(exchanged)
    elif has_model and (width := _width(exchanged, name, part)):
        seen, attack, scores = part.what, "distance from the class mean", _by_class_means(exchanged, name, width)
    else:
        return None
    members: list[Floats] = []
    others: list[Floats] = []
    for clients, message in exchanged.messages():
        own = np.flatnonzero(np.isin(owners, clients))
        for group, places in ((members, own), (others, own + len(owners))):
            group.append(scores(message, Split(samples.x[places], samples.y[places])))
    return f"{seen} of {whose}", attack, np.concatenate(members), np.concatenate(others)


def _by_weights(exchanged: Exchanged) -> Scores:
    """How much surer a client's model is of a sample than the one it was sent."""

    def confidences(model: Tensor, split: Split) -> Floats:
        return confidence_logits(score(exchanged.task, model, split.x, split.y)["loss"].double().cpu().numpy())

    return lambda message, split: confidences(message["model"], split) - confidences(exchanged.down["model"], split)


def _width(exchanged: Exchanged, name: str, part: Part) -> Literal["logits", "features", ""]:
    """What of the network's outputs a part has the mean of, class by class; empty: of neither."""
    task = exchanged.task
    if part.kind not in (Kind.LOGITS, Kind.PREDICTIONS, Kind.STATISTICS) or len(part.shape) != 2:
        return ""
    if part.shape == (task.classes, task.classes):
        return "logits"
    features = _outputs(exchanged, Split(task.dataset.train.x[:2], task.dataset.train.y[:2])).features.shape[1]
    return "features" if part.shape == (task.classes, features) else ""


def _outputs(exchanged: Exchanged, split: Split) -> Outputs:
    return predict(exchanged.task, exchanged.down["model"], _samples(exchanged, split))


def _samples(exchanged: Exchanged, split: Split) -> Samples:
    return Samples(split.x, split.y, torch.arange(len(split)), exchanged.task.dataset.normalise)


def _by_class_means(exchanged: Exchanged, name: str, which: Literal["logits", "features"]) -> Scores:
    """How much nearer a sample is to the mean of its class at a client than to that of all clients."""
    kind = exchanged.method.wire(exchanged.task).up[name].kind
    centre = torch.stack([message[name] for _, message in exchanged.messages()]).double().mean(0)

    def scores(message: Message, split: Split) -> Floats:
        outputs = _outputs(exchanged, split)
        found = (outputs.logits if which == "logits" else outputs.features).double()
        found = found.softmax(1) if kind is Kind.PREDICTIONS and which == "logits" else found
        near, far = ((found - mean.double()[split.y]).norm(dim=1) for mean in (message[name], centre))
        return np.asarray((far - near).cpu().numpy())

    return scores


def _shows_pictures(exchanged: Exchanged) -> bool:
    """Whether there is a generator of pictures that the server sees for itself."""
    if exchanged.masked or not exchanged.task.dataset.mean:
        return False
    return _pictures(exchanged, exchanged.messages()[0][1]) is not None


def _pictures(exchanged: Exchanged, message: Message) -> Tensor | None:
    """What the generator in a message makes: by name it is what a method keeps of one."""
    return exchanged.method.pictures(exchanged.task, dict(message), _PICTURES)


def _by_pictures(exchanged: Exchanged) -> Scores:
    """How near a sample is to what the client's generator makes (GAN-Leaks; Chen et al. 2020)."""

    def scores(message: Message, split: Split) -> Floats:
        pictures = _pictures(exchanged, message)
        assert pictures is not None
        distances = torch.cdist((split.x.double() / 255).flatten(1), pictures.detach().double().flatten(1))
        return np.asarray(-distances.min(1).values.cpu().numpy())

    return scores


def _has_discriminator(exchanged: Exchanged) -> bool:
    """Whether there is a client's discriminator that the server sees for itself, and can put samples to."""
    if exchanged.masked:
        return False
    dataset = exchanged.task.dataset
    one = _samples(exchanged, Split(dataset.train.x[:1], dataset.train.y[:1]))
    return exchanged.method.realness(exchanged.task, exchanged.messages()[0][1], one) is not None


def _by_discriminator(exchanged: Exchanged) -> Scores:
    """How surely the client's discriminator takes a sample for one of its own, not a made one (LOGAN; Hayes 2019)."""

    def scores(message: Message, split: Split) -> Floats:
        found = exchanged.method.realness(exchanged.task, message, _samples(exchanged, split))
        assert found is not None
        return np.asarray(found.double().cpu().numpy())

    return scores
