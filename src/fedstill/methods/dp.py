"""Differential privacy of whole clients, for any method whose server only takes sums: McMahan et al., 2018.

What a client sends is one vector: the update of its weights, and every other part of its uplink divided by the part's
scale. It is shortened to the norm `clip`, Gaussian noise is added to the sum, and the sum is divided by the expected
size of the cohort, which nobody's presence changes. The method inside gets this noisy mean in place of every update, so
that whatever it makes of it is as private. All clients count alike. What they keep for themselves never leaves them.

With `noise_shares` the server is not trusted: under secure aggregation it sees the sum alone, and each client clips its
own update and adds its share of the noise (Kairouz, Liu and Steinke 2021). The shares of so many clients are the noise
that is accounted, so that a sum of fewer is not made. The server knows whom it asked: that clients are drawn by chance
hides nobody from it, and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fedstill.core.choices import Sampling
from fedstill.core.device import to_current_device
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Guarantee, Part, Server, Uplink, Wire
from fedstill.methods.modifier import Modifier
from fedstill.privacy import accounting
from fedstill.privacy.accounting import Plan, Release
from fedstill.privacy.noise import gaussian
from fedstill.train.client import Client
from fedstill.train.task import LocalTraining, Task

_STATE = "dp"
_COUNT_NOISE = 0.05  # of the share of short updates: its standard deviation (Andrew et al.: cohort / 20 on the sum)
_CLIP_RATE = 0.2  # of the steps of the clip (Andrew et al.)
# Of one client's noise under masks, whose sums are whole multiples of 2^-30 up to 2^17: so many steps of that grid that
# rounding is nothing beside it, and so little that it is not cut off.
_FINEST, _COARSEST = 2.0**-18, 2.0**12
_LARGEST = 2.0**15  # of weights and clips under masks: noise on top is not cut off either, whatever a server sends


@dataclass(frozen=True)
class PrivateClients(Modifier):
    """What everybody may see of a round has Gaussian noise on all that one client adds to it; rounds are counted."""

    outermost: ClassVar[bool] = True
    unit: ClassVar[Literal["client", "sample"]] = "client"

    noise_multiplier: Annotated[
        float, Ge(0), "standard deviation of the noise on the sum, in clips; 0: found from target_epsilon, or 1"
    ] = 0.0
    delta: Annotated[float, Ge(0), Lt(1), "how likely the promise may fail; 0: 0.1 / clients"] = 0.0
    target_epsilon: Annotated[float, Ge(0), "most that may be spent; the run ends before it would be more"] = 0.0
    sampling: Annotated[Sampling, "each client is drawn by chance, or a fixed number of them (needs more noise)"] = (
        "poisson"
    )

    @property
    def guarantee(self) -> Guarantee:
        return self

    def check(self, task: Task) -> None:
        super().check(task)
        self.check_private(task)

    def check_private(self, task: Task) -> None:
        """Refuse what would make the promise untrue."""
        raise NotImplementedError

    @property
    def ledger_key(self) -> str:
        """Where in `server.state` the rounds are."""
        return self.server_keys[0]

    def delta_of(self, clients: int) -> float:
        return self.delta or 0.1 / clients

    def plan(self, drawn: tuple[int, int], rounds: int) -> Plan:
        """How so many rounds are accounted whose cohorts are drawn like this: from how many, and how many."""
        return Plan(*drawn, rounds, self.sampling)

    def start(self, server: Server) -> None:
        super().start(server)
        server.state[self.ledger_key] = {"rounds": []}

    def report(self, server: Server) -> dict[str, Any]:
        delta = self.delta_of(server.clients)
        return {
            "epsilon": accounting.spent(self._ledger(server), delta),
            "delta": delta,
            "of": "a client",
            "neighbours": "one client more or less" if self.sampling == "poisson" else "one client replaced",
            "noise_multiplier": self.noise_multiplier,
            # Where clients have the only models, a simulation measures these.
            "not covered": [] if self.global_model else ["clients' own models", "accuracy", "loss", "local_accuracy"],
        }

    def affords(self, server: Server, rounds: int) -> bool:
        if not self.target_epsilon:
            return True
        before = server.state[self.ledger_key]["rounds"]
        drawn = tuple(before[-1][:2]) if before else server.drawn
        ledger = _merged([*self._ledger(server), (self.plan(drawn, rounds), self.noise_multiplier)])
        return accounting.spent(ledger, self.delta_of(server.clients)) <= self.target_epsilon

    def release(self, samples: int, local: LocalTraining) -> Release | None:
        return None  # the server sees what clients send

    def remember(self, server: Server, earlier: dict[str, Any]) -> None:
        rounds = earlier.get(self.ledger_key, {}).get("rounds", [])
        own = server.state[self.ledger_key]
        if sum(entry[3] for entry in rounds) > sum(entry[3] for entry in own["rounds"]):
            server.state[self.ledger_key] = own | {"rounds": rounds}

    def count_round(self, server: Server) -> None:
        """A round is about to be known."""
        if not self.noise_multiplier:  # it is found before a run begins
            raise FedstillError(f"{self.name}: this run has no noise, and nothing would be private")
        entry = [*server.drawn, self.noise_multiplier, 1]
        rounds = server.state[self.ledger_key]["rounds"]
        if rounds and rounds[-1][:3] == entry[:3]:
            entry[3] = rounds[-1][3] + 1
            rounds = rounds[:-1]
        server.state[self.ledger_key] = server.state[self.ledger_key] | {"rounds": [*rounds, entry]}

    def _ledger(self, server: Server) -> list[tuple[Plan, float]]:
        """The rounds that were run."""
        return [
            (self.plan((clients, cohort), rounds), noise)
            for clients, cohort, noise, rounds in server.state[self.ledger_key]["rounds"]
        ]


@dataclass(frozen=True)
class DP(PrivateClients):
    """Clip every update, add noise to their sum, and account for what the models tell of any one client."""

    name: ClassVar[str] = "dp"
    paper: ClassVar[str] = "McMahan et al. 2018"
    server_keys: ClassVar[tuple[str, ...]] = (_STATE,)
    streams: ClassVar[tuple[str, ...]] = ("privacy noise", "share of the noise")
    sums_only: ClassVar[bool] = True  # with `noise_shares`, without which it is refused under masks

    clip: Annotated[float, Gt(0), "largest norm of a client's update; with adaptive_clip, of the first round's"] = 1.0
    adaptive_clip: Annotated[
        float, Ge(0), Lt(1), "share of the updates that the clip should leave as they are; 0: the clip stays"
    ] = 0.0
    scales: Annotated[str, "length of parts beside an update of norm 1, as in 'logits=10 known=3'"] = ""
    noise_shares: Annotated[
        int, Ge(0), "with secure_aggregation: clients whose noise together is the noise; 0: the server adds it"
    ] = 0

    def __post_init__(self) -> None:
        if self.noise_shares:  # a sum needs so many, and chance could draw fewer
            object.__setattr__(self, "sampling", "fixed")

    @property
    def fewest_clients(self) -> int:
        return max(super().fewest_clients, self.noise_shares)

    def check_private(self, task: Task) -> None:
        if reason := self.inner.beyond_sums:
            raise SettingError(f"dp gives the server the noisy sum of the updates alone, and {reason}; leave one out")
        if not self.inner.global_model:
            raise SettingError("dp: with this method clients keep models of their own, and how they do is not private")
        if self.inner.has_final_exchange:
            raise SettingError("dp does not cover what this method asks clients for after the last round")
        if task.buffers == "average" and task.size > task.trainable:
            raise SettingError(
                "dp: the average of BatchNorm's statistics is not private; set buffers=local or buffers=drop, or take "
                "a network with GroupNorm"
            )
        up = self.inner.wire(task).up
        for name, part in up.items():
            if part.optional or not part.dtype.is_floating_point:
                raise SettingError(f"dp cannot add noise to {name!r} ({part.what}): it is no vector of every update")
        if wrong := sorted(self._given_scales().keys() - up.keys()):
            raise SettingError(f"scales: clients do not send {wrong[0]!r}; they send {', '.join(up)}")
        if self.noise_shares:
            self._check_shares(task, up)

    def _check_shares(self, task: Task, up: dict[str, Part]) -> None:
        if self.adaptive_clip:
            raise SettingError("adaptive_clip follows what the server counts, who sees no update with noise_shares")
        if "model" in up and "model" not in self.inner.wire(task).down:
            raise SettingError("noise_shares: clients cannot clip how far a model moved that they were not sent")
        for name, part in up.items():
            noise = self.noise_multiplier * self.clip * self._scale(name, part) / math.sqrt(self.noise_shares)
            if self.clip * self._scale(name, part) > _LARGEST:
                raise SettingError(
                    f"noise_shares: clip x scale of {name!r} is above {_LARGEST:g}, the room of masked sums"
                )
            if noise and not _FINEST <= noise <= _COARSEST:
                raise SettingError(
                    f"noise_shares: each client's noise on {name!r} is {noise:.3g}, and the sums of secure_aggregation "
                    f"have room for {_FINEST:.1g} to {_COARSEST:g}; change clip, scales or noise_multiplier"
                )

    # --- what is promised -----------------------------------------------------------------------------------------

    def start(self, server: Server) -> None:
        super().start(server)
        server.state[_STATE] = {"clip": self.clip, "rounds": []}

    def plan(self, drawn: tuple[int, int], rounds: int) -> Plan:
        return Plan(1, 1, rounds) if self.noise_shares else super().plan(drawn, rounds)

    def release(self, samples: int, local: LocalTraining) -> Release | None:
        return Release(self.noise_multiplier, 1.0, 1) if self.noise_shares else None

    def report(self, server: Server) -> dict[str, Any]:
        found = super().report(server) | {"clip": server.state[_STATE]["clip"]}
        if self.noise_shares:
            found |= {"neighbours": "a client's update, or noise alone in its place", "noise_shares": self.noise_shares}
        return found

    # --- what a client adds to a sum that its server alone sees ---------------------------------------------------

    def wire(self, task: Task) -> Wire:
        wire = self.inner.wire(task)
        if not self.noise_shares:
            return wire
        # In float64: what is added up is rounded once, with the noise in it.
        up = {
            name: replace(part, dtype=torch.float64, least=None, most=None, what=f"{part.what}, clipped and with noise")
            for name, part in wire.up.items()
        }
        return replace(wire, up=up)

    def uplink(self, client: Client) -> Message:
        message = super().uplink(client)
        return self._noisy(client, message) if self.noise_shares else message

    def _noisy(self, client: Client, message: Message) -> Message:
        """The message with its update clipped, and with this client's share of the noise."""
        if not self.noise_multiplier:
            raise SettingError("noise_shares: a client has to know the noise: give noise_multiplier")
        parts, trained = self.inner.wire(client.task).up, client.task.trainable
        self._check_shares(client.task, parts)
        start = client.down["model"].double() if "model" in parts else torch.zeros(0)
        if start.numel() and float(start.abs().max()) > _LARGEST:
            raise SettingError(f"noise_shares: the model has weights above {_LARGEST:g}, where sums cut noise off")
        moved = {name: message[name].double() for name in parts}
        if "model" in moved:
            moved["model"] = moved["model"][:trained] - start[:trained]
        scales = {name: self._scale(name, part) for name, part in parts.items()}
        norm, factor = _shortened(moved, scales, self.clip)
        if not math.isfinite(norm):  # noise alone: a client that refused, or was left out, would tell that it diverged
            moved, factor = {name: torch.zeros_like(x) for name, x in moved.items()}, 1.0
        generator = client.stream("share of the noise") if client.simulated else None
        noise = self.noise_multiplier * self.clip / math.sqrt(self.noise_shares)
        for name, x in moved.items():
            drawn = to_current_device(gaussian(x.numel(), generator)).view(x.shape)
            moved[name] = factor * x + noise * scales[name] * drawn
        if "model" in moved:
            moved["model"] = torch.cat([start[:trained] + moved["model"], start[trained:]])
        return moved

    # --- what the server makes of the updates ---------------------------------------------------------------------

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        if self.noise_shares:
            self._aggregate_noisy(server, uplinks)
            return
        state, parts = server.state[_STATE], self.inner.wire(server.task).up
        clip, expected = state["clip"], server.drawn[1]
        scales = {name: self._scale(name, part) for name, part in parts.items()}
        total = {name: torch.zeros(part.shape, dtype=torch.float64) for name, part in parts.items()}
        total = {name: to_current_device(tensor) for name, tensor in total.items()}
        short = 0.0  # updates that are no longer than the clip, each less a half
        for up in uplinks:
            moved = {name: self._from_start(server, name, up[name]) for name in parts}
            norm, factor = _shortened(moved, scales, clip)
            short += 0.5 if norm <= clip else -0.5
            for name, x in moved.items():
                total[name].add_(x, alpha=factor)
        self.count_round(server)
        generator = server.stream("privacy noise") if server.simulated else None
        noise, count_noise = self._split(expected)
        message: Message = {}
        for name, part in parts.items():
            drawn = to_current_device(gaussian(total[name].numel(), generator)).view(part.shape)
            mean = (total[name] + noise * clip * scales[name] * drawn) / expected
            message[name] = self._to_end(server, name, mean, part)
        if self.adaptive_clip:
            share = 0.5 + (short + count_noise * float(gaussian(1, generator))) / expected
            server.state[_STATE]["clip"] = clip * math.exp(_CLIP_RATE * (self.adaptive_clip - share))
            server.notes["short updates"] = share  # with its noise
        with _alike(server):
            super().aggregate(server, (Uplink(k, 1, dict(message)) for k in range(expected)))

    def _aggregate_noisy(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        """The same of a mean to which the clients have added the noise: it is what each of the uplinks has."""
        ups = list(uplinks)
        self.count_round(server)
        if len(ups) < self.noise_shares:
            raise FedstillError(f"dp: the noise of {len(ups)} clients is less than is accounted ({self.noise_shares})")
        parts = self.inner.wire(server.task).up
        message = {
            name: self._to_end(server, name, self._from_start(server, name, ups[0][name]), part)
            for name, part in parts.items()
        }
        with _alike(server):
            super().aggregate(server, (Uplink(up.client, 1, dict(message)) for up in ups))

    def _split(self, expected: int) -> tuple[float, float]:
        """The noise multiplier of the updates, and the noise on the count of short ones.

        Both together tell as much as the updates alone would with `noise_multiplier` (Andrew et al., Theorem 1): a
        client moves the count by a half.
        """
        if not self.adaptive_clip:
            return self.noise_multiplier, 0.0
        z, of_count = self.noise_multiplier, max(_COUNT_NOISE * expected, self.noise_multiplier)
        return (z**-2 - (2 * of_count) ** -2) ** -0.5, of_count

    def _from_start(self, server: Server, name: str, sent: Tensor) -> Tensor:
        """What is clipped: of the model, how far its weights moved."""
        if name != "model":
            return sent.double()
        moved = torch.zeros(sent.shape, dtype=torch.float64, device=sent.device)
        trained = server.task.trainable
        moved[:trained] = sent[:trained].double() - server.model[:trained]
        return moved

    def _to_end(self, server: Server, name: str, mean: Tensor, part: Part) -> Tensor:
        """The mean as if a client had sent it."""
        if name == "model":
            trained = server.task.trainable
            model = server.model.clone()
            model[:trained] = (server.model[:trained].double() + mean[:trained]).to(model.dtype)
            return model
        return (mean if part.least is None else mean.clamp(min=part.least)).to(part.dtype)

    def _scale(self, name: str, part: Part) -> float:
        default = 1.0 if name == "model" else part.scale or math.sqrt(max(1, math.prod(part.shape)))
        return self._given_scales().get(name, default)

    def _given_scales(self) -> dict[str, float]:
        found = {}
        for word in self.scales.replace(",", " ").split():
            name, _, value = word.partition("=")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = 0.0
            if not 0 < found[name] < math.inf:
                raise SettingError(f"scales: {word!r} is not a part and a number above 0; write 'logits=10 known=3'")
        return found


def _shortened(moved: Message, scales: Mapping[str, float], clip: float) -> tuple[float, float]:
    """The norm of what a client sends, and what shortens it to the clip."""
    norm = math.sqrt(sum(float(x.square().sum()) / scales[name] ** 2 for name, x in moved.items()))
    return norm, min(1.0, clip / norm) if norm else 1.0


def _merged(rounds: list[tuple[Plan, float]]) -> list[tuple[Plan, float]]:
    """The same, if the last are like those before them, as one entry."""
    *others, (last, noise) = rounds
    if others:
        before, as_much = others[-1]
        if as_much == noise and (before.clients, before.cohort) == (last.clients, last.cohort):
            return [*others[:-1], (Plan(last.clients, last.cohort, before.rounds + last.rounds, last.sampling), noise)]
    return rounds


@contextmanager
def _alike(server: Server) -> Iterator[None]:
    """For methods that weigh clients by `server.sizes`."""
    counts, server.sizes = server.sizes, np.minimum(server.sizes, 1)
    try:
        yield
    finally:
        server.sizes = counts
