"""Where colluding attackers speak: on the server, when every uplink of the round is there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedstill.aggregate.mean import weighted_mean
from fedstill.attacks.attack import Attack
from fedstill.attacks.collusion import Knowledge
from fedstill.methods.base import Method, Server, Uplink
from fedstill.methods.robust import Robust


def colluding(attack: Attack, method: Method, server: Server, uplinks: Iterator[Uplink]) -> Iterator[Uplink]:
    """The uplinks of a round, in their order, with what the attackers make of them once all are there."""
    ups = list(uplinks)
    trained = server.task.trainable
    honest = [up["model"][:trained].double() for up in ups if up.client not in attack.clients]
    if not honest or len(honest) == len(ups):
        yield from ups
        return

    def forged(weights: Tensor) -> list[Uplink]:
        def as_forged(up: Uplink) -> Uplink:
            model = torch.cat([weights.to(up["model"].dtype), up["model"][trained:]])
            return replace(up, message=up.message | {"model": model})

        return [as_forged(up) if up.client in attack.clients else up for up in ups]

    round_ = Knowledge(server.model[:trained].double(), torch.stack(honest))
    if attack.kind == "adaptive":
        yield from min(
            map(forged, round_.candidates()), key=lambda sent: round_.gain(let_through(method, server, sent))
        )
    else:
        yield from forged(round_.sent(attack.kind, attack.scale))


def let_through(method: Method, server: Server, uplinks: list[Uplink]) -> Tensor:
    """The mean model of what the rules of a method let through; nothing on the server changes."""
    trial = copy.copy(server)
    while isinstance(method, Robust):
        trial.state, trial.notes = dict(server.state), {}
        uplinks, method = method.defend(trial, uplinks), method.inner
    return weighted_mean((up["model"], up.samples) for up in uplinks)
