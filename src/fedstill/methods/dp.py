"""Differential privacy of whole clients, for any method whose server only takes sums: McMahan et al., 2018.

What a client sends is one vector: the update of its weights, and every other part of its uplink divided by the part's
scale. It is shortened to the norm `clip`, Gaussian noise is added to the sum, and the sum is divided by the expected
size of the cohort, which nobody's presence changes. The method inside gets this noisy mean in place of every update, so
that whatever it makes of it is as private. All clients count alike. What they keep for themselves never leaves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fedstill.core.choices import Sampling
from fedstill.core.device import to_current_device
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.tree import Message
from fedstill.methods.base import Guarantee, Part, Server, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.privacy import accounting
from fedstill.privacy.accounting import Plan
from fedstill.privacy.noise import gaussian
from fedstill.train.task import Task

_STATE = "dp"
_COUNT_NOISE = 0.05  # of the share of short updates: its standard deviation (Andrew et al.: cohort / 20 on the sum)
_CLIP_RATE = 0.2  # of the steps of the clip (Andrew et al.)


@dataclass(frozen=True)
class DP(Modifier):
    """Clip every update, add noise to their sum, and account for what the models tell of any one client."""

    name: ClassVar[str] = "dp"
    paper: ClassVar[str] = "McMahan et al. 2018"
    server_keys: ClassVar[tuple[str, ...]] = (_STATE,)
    streams: ClassVar[tuple[str, ...]] = ("privacy noise",)
    outermost: ClassVar[bool] = True
    unit: ClassVar[Literal["client", "sample"]] = "client"

    noise_multiplier: Annotated[
        float, Ge(0), "standard deviation of the noise on the sum, in clips; 0: found from target_epsilon, or 1"
    ] = 0.0
    clip: Annotated[float, Gt(0), "largest norm of a client's update; with adaptive_clip, of the first round's"] = 1.0
    delta: Annotated[float, Ge(0), Lt(1), "how likely the promise may fail; 0: 0.1 / clients"] = 0.0
    target_epsilon: Annotated[float, Ge(0), "most that may be spent; the run ends before it would be more"] = 0.0
    sampling: Annotated[Sampling, "each client is drawn by chance, or a fixed number of them (needs more noise)"] = (
        "poisson"
    )
    adaptive_clip: Annotated[
        float, Ge(0), Lt(1), "share of the updates that the clip should leave as they are; 0: the clip stays"
    ] = 0.0
    scales: Annotated[str, "length of parts beside an update of norm 1, as in 'logits=10 known=3'"] = ""

    def check(self, task: Task) -> None:
        super().check(task)
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

    @property
    def guarantee(self) -> Guarantee:
        return self

    # --- what is promised -----------------------------------------------------------------------------------------

    def start(self, server: Server) -> None:
        super().start(server)
        server.state[_STATE] = {"clip": self.clip, "rounds": []}

    def delta_of(self, clients: int) -> float:
        return self.delta or 0.1 / clients

    def report(self, server: Server) -> dict[str, Any]:
        delta = self.delta_of(server.clients)
        return {
            "epsilon": accounting.spent(_ledger(server, self.sampling), delta),
            "delta": delta,
            "of": "a client",
            "neighbours": "one client more or less" if self.sampling == "poisson" else "one client replaced",
            "noise_multiplier": self.noise_multiplier,
            "clip": server.state[_STATE]["clip"],
        }

    def affords(self, server: Server, rounds: int) -> bool:
        if not self.target_epsilon:
            return True
        before = server.state[_STATE]["rounds"]
        clients, cohort = before[-1][:2] if before else server.drawn
        next_rounds = Plan(clients, cohort, rounds, self.sampling), self.noise_multiplier
        ledger = _merged([*_ledger(server, self.sampling), next_rounds])
        return accounting.spent(ledger, self.delta_of(server.clients)) <= self.target_epsilon

    # --- what the server makes of the updates ---------------------------------------------------------------------

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        if not self.noise_multiplier:  # it is found before a run begins
            raise FedstillError("dp: this run has no noise, and nothing would be private")
        state, parts = server.state[_STATE], self.inner.wire(server.task).up
        clip, (drawn_from, expected) = state["clip"], server.drawn
        scales = {name: self._scale(name, part) for name, part in parts.items()}
        total = {name: torch.zeros(part.shape, dtype=torch.float64) for name, part in parts.items()}
        total = {name: to_current_device(tensor) for name, tensor in total.items()}
        short = 0.0  # updates that are no longer than the clip, each less a half
        for up in uplinks:
            moved = {name: self._from_start(server, name, up[name]) for name in parts}
            norm = math.sqrt(sum(float(x.square().sum()) / scales[name] ** 2 for name, x in moved.items()))
            short += 0.5 if norm <= clip else -0.5
            for name, x in moved.items():
                total[name].add_(x, alpha=min(1.0, clip / norm) if norm else 1.0)
        generator = server.stream("privacy noise") if server.simulated else None
        noise, count_noise = self._split(expected)
        message: Message = {}
        for name, part in parts.items():
            drawn = to_current_device(gaussian(total[name].numel(), generator)).view(part.shape)
            mean = (total[name] + noise * clip * scales[name] * drawn) / expected
            message[name] = self._to_end(server, name, mean, part)
        entry = [drawn_from, expected, self.noise_multiplier, 1]
        rounds = state["rounds"]
        if rounds and rounds[-1][:3] == entry[:3]:
            entry[3] = rounds.pop()[3] + 1
        server.state[_STATE] = {"clip": clip, "rounds": [*rounds, entry]}
        if self.adaptive_clip:
            share = 0.5 + (short + count_noise * float(gaussian(1, generator))) / expected
            server.state[_STATE]["clip"] = clip * math.exp(_CLIP_RATE * (self.adaptive_clip - share))
            server.notes["short updates"] = share  # with its noise
        with _alike(server):
            super().aggregate(server, (Uplink(k, 1, dict(message)) for k in range(expected)))

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


def _ledger(server: Server, sampling: Sampling) -> list[tuple[Plan, float]]:
    """The rounds that were run."""
    return [
        (Plan(clients, cohort, rounds, sampling), noise)
        for clients, cohort, noise, rounds in server.state[_STATE]["rounds"]
    ]


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
