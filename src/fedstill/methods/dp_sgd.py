"""Differential privacy of single samples, made by each client itself: Abadi et al., "Deep learning with …", 2016.

Every step of a client's training is private (`train/private.py`), so that whatever follows from its model is: the
server need not be trusted, and may do with each client's model what it likes. What is promised is accounted client by
client, by Rényi divergences as Opacus computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from fedstill.core.choices import Sampling
from fedstill.core.errors import SettingError
from fedstill.methods.base import Guarantee, Server, Uplink
from fedstill.methods.modifier import Modifier
from fedstill.models.norms import norms
from fedstill.privacy.accounting import Release
from fedstill.train.client import Client
from fedstill.train.loop import Objective
from fedstill.train.private import PrivateSteps, opacus, sampled, step_count
from fedstill.train.task import LocalTraining, Task, classifier

_STATE = "dp-sgd"


@dataclass(frozen=True)
class DPSGD(Modifier):
    """Clients clip each sample's gradient and add noise to every step, and the steps are accounted client by client."""

    name: ClassVar[str] = "dp-sgd"
    paper: ClassVar[str] = "Abadi et al. 2016"
    server_keys: ClassVar[tuple[str, ...]] = (_STATE,)
    streams: ClassVar[tuple[str, ...]] = ("private samples", "sample noise")
    outermost: ClassVar[bool] = True
    unit: ClassVar[Literal["client", "sample"]] = "sample"

    noise_multiplier: Annotated[float, Gt(0), "standard deviation of the noise on a step's sum, in clips"] = 1.0
    clip: Annotated[float, Gt(0), "largest norm of a sample's gradient"] = 1.0
    delta: Annotated[float, Gt(0), Lt(1), "how likely the promise may fail; below 1 / samples of a client"] = 1e-5
    target_epsilon: Annotated[float, Ge(0), "most that any client may spend; the run ends before; 0: no end"] = 0.0

    def check(self, task: Task) -> None:
        super().check(task)
        self.check_private(task)

    def check_private(self, task: Task) -> None:
        opacus("grad_sample")
        if reason := self.inner.beyond_steps:
            raise SettingError(f"dp-sgd makes the steps of training private, and {reason}; leave one out")
        if self.inner.has_final_exchange:
            raise SettingError("dp-sgd does not cover what this method asks clients for after the last round")
        if norms(classifier(task.nets.get("student"))):
            raise SettingError(
                "dp-sgd: BatchNorm mixes the samples of a batch; take a network with GroupNorm, for example "
                "model_options.norm=group"
            )

    @property
    def guarantee(self) -> Guarantee:
        return self

    @property
    def sampling(self) -> Sampling:
        return "fixed"

    def objective(self, client: Client) -> Objective:
        inner = super().objective(client)
        if inner.inputs or inner.modules:
            raise SettingError("dp-sgd: this method trains on more than the client's samples; leave one out")
        choice = client.stream("private samples") if client.simulated else None
        noise = client.stream("sample noise") if client.simulated else None
        return replace(inner, private=PrivateSteps(self.noise_multiplier, self.clip, choice, noise))

    def start(self, server: Server) -> None:
        super().start(server)
        server.state[_STATE] = {}

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        # Whoever was asked counts: what comes too late to be used was seen as well.
        rounds: dict[str, int] = server.state[_STATE]
        server.state[_STATE] = rounds | {str(k): rounds.get(str(k), 0) + 1 for k in server.cohort}
        super().aggregate(server, uplinks)

    def release(self, samples: int, local: LocalTraining) -> Release | None:
        return Release(self.noise_multiplier, sampled(samples, local), step_count(samples, local))

    def remember(self, server: Server, earlier: dict[str, Any]) -> None:
        own, rounds = server.state[_STATE], earlier.get(_STATE, {})
        server.state[_STATE] = own | {k: max(n, own.get(k, 0)) for k, n in rounds.items()}

    def report(self, server: Server) -> dict[str, Any]:
        taken = {int(k): rounds for k, rounds in server.state[_STATE].items()}
        return {
            "epsilon": self._largest(server, taken),
            "delta": self.delta,
            "of": "a sample",
            "neighbours": "one sample more or less at a client",
            "noise_multiplier": self.noise_multiplier,
            "clip": self.clip,
        }

    def affords(self, server: Server, rounds: int) -> bool:
        if not self.target_epsilon:
            return True
        taken = server.state[_STATE]
        ahead = {k: taken.get(str(k), 0) + rounds for k in server.sizes.nonzero()[0].tolist()}
        return self._largest(server, ahead) <= self.target_epsilon

    def _largest(self, server: Server, taken: dict[int, int]) -> float:
        """The epsilon of the client that spent most, after these rounds of each."""
        most: dict[int, int] = {}  # by number of samples: of those with as many, one that took part most often
        for k, rounds in taken.items():
            n = int(server.sizes[k])
            most[n] = max(most.get(n, 0), rounds)
        local = server.task.local
        return max((sample_epsilon(n, r, local, self.noise_multiplier, self.delta) for n, r in most.items()), default=0)


@lru_cache(maxsize=1 << 16)
def sample_epsilon(n: int, rounds: int, local: LocalTraining, noise: float, delta: float) -> float:
    """What a client with n samples has spent after so many rounds of training."""
    rdp = opacus("accountants.analysis.rdp")
    orders, one = _one_step(sampled(n, local), noise)
    steps = rounds * step_count(n, local)
    spent, _ = rdp.get_privacy_spent(orders=list(orders), rdp=[steps * r for r in one], delta=delta)
    return float(spent)


@lru_cache(maxsize=1 << 12)
def _one_step(rate: float, noise: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Orders, and the Rényi divergence of one step at each."""
    rdp, orders = opacus("accountants.analysis.rdp"), tuple(opacus("accountants").RDPAccountant.DEFAULT_ALPHAS)
    return orders, tuple(map(float, rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(orders))))
