"""What a method is: four answers, and a declaration of what crosses the wire.

1. What does the server send? (`downlink`) 2. What does a client minimise? (`objective`) 3. What does a client send
back? (`uplink`) 4. What does the server make of it, and which model is "the model"? (`aggregate`, `models`)

A method is a frozen dataclass whose fields are its hyper-parameters, under the paper's names. `FedAvg` answers
all four; another method overrides the answers that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.aggregate.mean import weighted_mean
from fedstill.core import seeds
from fedstill.core.choices import Sampling
from fedstill.core.reports import cleaned
from fedstill.core.store import Store
from fedstill.core.tree import Message, Tree, first_not_finite
from fedstill.distill.stage import predict_all
from fedstill.methods.kinds import Kind
from fedstill.models.base import Classifier
from fedstill.privacy.accounting import Release
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Objective
from fedstill.train.task import LocalTraining, Samples, Task

# What a method needs of the clients' networks, where they differ.
Networks = Literal["one", "group", "teach", "features", "head", "any"]
NETWORKS: dict[Networks, str] = {
    "one": "one network for all clients",
    "group": "one in each group, which is a federation of its own",
    "teach": "one in each group; all groups teach all",
    "features": "features of one size",
    "head": "features and heads of one size",
    "any": "any",
}


@dataclass(frozen=True)
class Part:
    """One named tensor of a message: its shape, its dtype, and in words what it tells."""

    shape: tuple[int, ...]
    what: str
    dtype: torch.dtype = torch.float32
    optional: bool = False  # not in every round's message
    variable: bool = False  # a vector of at most this length
    least: float | None = None  # the smallest number that can be in it
    most: float | None = None  # and the largest
    # Which robust rules protect what the server makes of it: any (it takes a plain mean or sum over the clients), those
    # that choose whole uplinks, or none (one client's number can count without limit).
    defence: Literal["any", "selection", "none"] = "selection"
    kind: Kind = Kind.OTHER  # what a site's policy knows it as
    # How long it is, about, beside a model's update of length 1: what is clipped together is divided by it. None: its
    # numbers are about 1.
    scale: float | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has, at most."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Wire:
    """Everything that crosses between the server and one client in one round, and once after the last."""

    down: dict[str, Part]
    up: dict[str, Part]
    last: dict[str, Part] = field(default_factory=dict)


def misfit(message: Tree, declared: dict[str, Part]) -> str | None:
    """How a message differs from what is declared, or None."""
    if not isinstance(message, dict):
        return f"it is a {type(message).__name__}, not a dict of named tensors"
    required = {name for name, part in declared.items() if not part.optional}
    if not required <= set(message) <= set(declared):
        return f"it holds {cleaned(sorted(message))}, declared is {sorted(declared)}"
    for name, tensor in message.items():
        part = declared[name]
        if not isinstance(tensor, Tensor) or tensor.dtype != part.dtype:
            return f"{name} is not a tensor of {part.dtype}"
        shorter = part.variable and tensor.dim() == 1 and len(tensor) <= part.shape[0]
        if tuple(tensor.shape) != part.shape and not shorter:
            return f"{name} has shape {tuple(tensor.shape)}, declared is {part.shape}"
    return None


def fault(message: Tree, declared: dict[str, Part]) -> str | None:
    """What is wrong with what a client sent, or None."""
    if problem := misfit(message, declared):
        return problem
    if bad := first_not_finite(message):
        return f"{bad} is not finite"
    for name, tensor in message.items():
        least = declared[name].least
        if least is not None and tensor.numel() and tensor.min() < least:
            return f"{name} holds numbers below {least:g}"
        most = declared[name].most
        if most is not None and tensor.numel() and tensor.max() > most:
            return f"{name} holds numbers above {most:g}"
    return None


@dataclass(frozen=True)
class Needs:
    """What a method asks for beyond FedAvg."""

    proxy_data: bool
    server_labels: bool
    changed_model: bool
    extra_information: tuple[str, ...]  # what clients reveal beyond weights, in words

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.proxy_data or other.proxy_data,
            self.server_labels or other.server_labels,
            self.changed_model or other.changed_model,
            (*self.extra_information, *other.extra_information),
        )


@dataclass(frozen=True)
class Uplink:
    """What one client sent, and how many samples it trained on."""

    client: int
    samples: int
    message: Message
    task: Task | None = None  # its group's, where clients have different networks

    def __getitem__(self, part: str) -> Tensor:
        return self.message[part]


class Server:
    """What a method's server side works with."""

    def __init__(
        self,
        task: Task,
        sizes: NDArray[np.int64],
        store: Store,
        pool: Samples | None = None,
        *,
        clients: int | None = None,
        region: int = 0,
        threads: int = 1,
        grouped: bool = False,
    ) -> None:
        self.task = task
        self.sizes = sizes  # training samples of every client, active or not
        self.clients = len(sizes) if clients is None else clients  # how many there are, active or not
        self.region = region  # the number of its region, if there are several
        self.grouped = grouped  # whether its clients are those with one of several networks
        self.pool = pool  # labelled samples that the server itself holds
        self.round = 0  # the round in progress, from 1
        self.drawn = self.clients, self.clients  # how many the round's cohort is drawn from, and its expected size
        self.cohort: list[int] = []  # the clients that were asked in the round, whether they answer or not
        self.simulated = True  # if not, there is somebody from whom random numbers must be kept secret
        self.model: Tensor = task.initial  # the global weights
        self.before: Tensor = task.initial  # those that the round began with, for what works after the average
        self.sent: Message = {}  # what the round's clients were sent, where it was compressed on the way
        self.state: dict[str, Any] = {}  # what the method keeps between rounds; part of every checkpoint
        self.peers: tuple[Server, ...] = ()  # those of the other groups, where clients have different networks
        self.ensembles: dict[str, list[Uplink]] = {}  # of a round, by method, until groups have taught each other
        self.notes: dict[str, Any] = {}  # what the method has to say about the round, for its record
        self.store = store  # what the method keeps for single clients, on disk
        self._threads = threads  # how many cores it may use at once, while clients wait

    def predict_all(self, models: Sequence[Tensor], samples: Samples) -> list[Outputs]:
        """Outputs of each of these models for each sample, in one pass; for every epoch that follows."""
        return predict_all(self.task, models, samples, self._threads)

    def outputs_of(self, uplinks: Sequence[Uplink], samples: Samples) -> list[Outputs]:
        """Outputs of the model that each client sent, by its own network, for each sample; in one pass."""
        tasks = [up.task or self.task for up in uplinks]
        found: dict[int, Outputs] = {}
        for task in dict.fromkeys(map(id, tasks)):
            places = [i for i, own in enumerate(tasks) if id(own) == task]
            models = [uplinks[i]["model"] for i in places]
            found |= zip(places, predict_all(tasks[places[0]], models, samples, self._threads), strict=True)
        return [found[i] for i in range(len(uplinks))]

    def rng(self, purpose: str) -> torch.Generator:
        """A random stream for one purpose of the server in this round: never one that the library draws from."""
        return self.stream(f"own: {purpose}")

    def stream(self, purpose: str) -> torch.Generator:
        """The library's own streams; a method declares those it draws from in `streams`."""
        where = (self.round, self.region) if self.region else (self.round,)
        return seeds.torch_rng(self.task.seed, f"server: {purpose}", *where)


class Guarantee(Protocol):
    """Differential privacy that a method gives; see `fedstill.methods.dp`."""

    @property
    def unit(self) -> Literal["client", "sample"]:
        """Who is protected: clients with all that they have, from others; or each sample, from the server too."""

    @property
    def sampling(self) -> Sampling:
        """How cohorts are drawn."""

    def report(self, server: Server) -> dict[str, Any]:
        """What is promised so far, for the round's record: `epsilon`, `delta`, and of whom."""

    def affords(self, server: Server, rounds: int) -> bool:
        """Whether so many further rounds stay within the budget."""

    def check_private(self, task: Task) -> None:
        """Refuse, with a SettingError, what would make the promise untrue."""

    def release(self, samples: int, local: LocalTraining) -> Release | None:
        """What a client that trains for a round on so many samples tells the server; None: nothing hides it there."""

    def remember(self, server: Server, earlier: dict[str, Any]) -> None:
        """Count what an `earlier` state had counted, also where the server has gone back behind it: it was seen."""


@dataclass(frozen=True)
class Method:
    """The contract. Derive from `FedAvg`, which fulfils it."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs_proxy_data: ClassVar[bool] = False
    needs_server_labels: ClassVar[bool] = False  # samples with labels on the server: the setting `pool`
    changes_model: ClassVar[bool] = False
    extra_information: ClassVar[str] = ""  # what clients reveal beyond weights, in words
    other_networks: ClassVar[str] = ""  # what `networks` is with other settings, in words
    # Names that methods which are composed may not share: keys of `server.state` and of `client.state`, and purposes of
    # the random streams it draws from.
    server_keys: ClassVar[tuple[str, ...]] = ()
    client_keys: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[tuple[str, ...]] = ()
    revision: ClassVar[int] = 0  # raised when the same settings come to give other numbers
    # Whether its `aggregate` needs nothing but the mean of what clients send, part by part, all counting alike. Counts
    # only for the class that has both.
    sums_only: ClassVar[bool] = False
    default_regions: ClassVar[int] = 1  # unless `regions` is set; more: it is made to aggregate regions

    def needs(self) -> Needs:
        """What this method, with these settings, asks for."""
        extra = (self.extra_information,) if self.extra_information else ()
        return Needs(self.needs_proxy_data, self.needs_server_labels, self.changes_model, extra)

    @property
    def global_model(self) -> bool:
        """Whether the server has a model; if not, clients keep models of their own."""
        return True

    @property
    def networks(self) -> Networks:
        """What it needs of the networks, where clients have different ones."""
        return "group"

    @property
    def model_per_group(self) -> bool:
        """Whether there is a model for each network, where clients have different ones: weights cross."""
        return self.networks in ("group", "teach")

    @property
    def needs_other_networks(self) -> bool:
        """Whether a client works with the networks of other groups too."""
        return False

    def check(self, task: Task) -> None:
        """Refuse, with a SettingError, a task that the method cannot do."""

    @property
    def fewest_clients(self) -> int:
        """How many clients a round needs."""
        return 1

    @property
    def beyond_sums(self) -> str:
        """What the server does with single clients' updates, in words; empty: it only takes sums of them."""
        return ""

    @property
    def beyond_steps(self) -> str:
        """What clients make of their samples beside steps on a mean over them, in words; empty: nothing."""
        return ""

    @property
    def guarantee(self) -> Guarantee | None:
        """The differential privacy that the method gives, if it does."""
        return None

    @property
    def averages_all_clients(self) -> bool:
        """Whether the model is already the mean of every client's latest one, active or not."""
        return False

    def network(self, net: Classifier) -> Classifier:
        """The network this method trains, given the user's."""
        return net

    def wire(self, task: Task) -> Wire:
        """What crosses, for checks and for `fedstill methods`."""
        raise NotImplementedError

    def start(self, server: Server) -> None:
        """Set up `server.state` before the first round."""

    def begin(self, server: Server) -> None:
        """Note, at the start of a round, what became of `server.model` in the one before."""

    def downlink(self, server: Server) -> Message:
        """1. What the server sends to every client of the round."""
        raise NotImplementedError

    def objective(self, client: Client) -> Objective:
        """2. What a client minimises. Called once per client and round, with `client.net` at the sent weights."""
        raise NotImplementedError

    def uplink(self, client: Client) -> Message:
        """3. What a client sends back, after training."""
        raise NotImplementedError

    def receive(self, client: Client) -> None:
        """Give `client.net` the weights to start from: those that were sent."""
        client.receive()

    @final
    def prepare(self, client: Client) -> Objective:
        """A client's round up to its training."""
        self.receive(client)
        return self.objective(client)

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        """4. Update `server` from the uplinks, which come one at a time and in a fixed order.

        Consume all of them. Keep what they hold only if the method needs the ensemble.
        """
        raise NotImplementedError

    def across_groups(self, servers: Sequence[Server]) -> None:
        """Where clients have different networks: what groups learn from each other, once each has aggregated.

        All groups are there, also those of which no client was drawn.
        """

    def end(self, server: Server) -> None:
        """Note, when a round is over for all groups, what became of `server.model`; the counterpart of `begin`."""

    def models(self, server: Server) -> dict[str, Tensor]:
        """The models to evaluate. The first is the model: the one that is saved and headlines the results."""
        return {"model": server.model}

    def own_model(self, state: dict[str, Any], kept: dict[str, Any]) -> Tensor | None:
        """A client's own model, as it last trained it: from its state, or from what the server keeps for it."""
        return None

    def parts(self) -> list[Method]:
        """The methods that are composed in this one, the client side first."""
        return [self]

    def regional(self) -> Method:
        """The method that runs inside each region where there are regions."""
        return self

    def merge(self, server: Server, models: Sequence[Tensor]) -> None:
        """Update the global `server` from the models of the regions, at the end of an episode: their mean."""
        server.model = weighted_mean((model, 1) for model in models)
        server.notes["stage"] = "average"

    def merge_networks(self, servers: Sequence[Server], regions: Sequence[Uplink]) -> None:
        """The same where regions have different networks: update each region's server from the regions' models.

        Regions with the same network get the mean of their models. Those that are not there, or not yet, have servers
        too.
        """
        for server in servers:
            alike = [up["model"] for up in regions if up.task is not None and up.task.nets is server.task.nets]
            server.model = weighted_mean((model, 1) for model in alike) if alike else server.model
            server.notes["stage"] = "average"

    @property
    def has_final_exchange(self) -> bool:
        """Whether every client sends something once more after the last round, with `client.net` at the final model."""
        return False

    def final_uplink(self, client: Client) -> Message:
        """What a client sends then."""
        raise NotImplementedError

    def final_aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        """What the server makes of it; `models` then gives the result."""
        raise NotImplementedError

    def pictures(self, task: Task, state: dict[str, Any], count: int) -> Tensor | None:
        """What a client's generator makes, as (N, C, H, W) with values in 0..1; None: it has no generator."""
        return None

    def realness(self, task: Task, message: Message, samples: Samples) -> Tensor | None:
        """The logit by which the discriminator in an uplink takes each sample for a real one; None: there is none."""
        return None
