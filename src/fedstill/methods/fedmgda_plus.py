"""FedMGDA+: Hu et al., "Federated learning meets multi-objective optimization", 2022."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedstill.core.device import to_current_device
from fedstill.core.space import Search
from fedstill.methods.base import Server, Uplink
from fedstill.methods.fedavg import FedAvg

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class FedMGDAPlus(FedAvg):
    """Step along the common descent direction of the clients' normalised updates."""

    name: ClassVar[str] = "fedmgda-plus"
    paper: ClassVar[str] = "Hu et al. 2022"

    epsilon: Annotated[float, Ge(0), Le(1), Search("0..1"), "how far the weights may leave n_k/n"] = 0.1
    eta: Annotated[
        float, Gt(0), Search("log:0.1..3"), "length of the server's step: updates are normalised to length 1"
    ] = 1.0

    @property
    def beyond_sums(self) -> str:
        return "fedmgda-plus compares the clients' updates with each other"

    def aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        ups = list(uplinks)  # the direction depends on all of them at once
        trainable, w_t = server.task.trainable, server.model.double()
        drifts = w_t - torch.stack([up["model"] for up in ups])
        lengths = drifts[:, :trainable].norm(dim=1, keepdim=True).clamp(min=1e-12)
        g = drifts[:, :trainable] / lengths
        samples = np.array([up.samples for up in ups], float)
        gram = (g @ g.T).cpu().numpy()
        weights = to_current_device(torch.from_numpy(common_descent(gram, samples / samples.sum(), self.epsilon)))
        model = w_t - weights @ drifts  # buffers: the weighted mean
        model[:trainable] = w_t[:trainable] - self.eta * (weights @ g)
        server.model = model.to(server.model.dtype)


def common_descent(gram: FloatArray, prior: FloatArray, epsilon: float) -> FloatArray:
    """argmin of ||sum_k lambda_k g_k||^2 over the simplex with |lambda_k - prior_k| <= epsilon, from g's Gram matrix.

    >>> common_descent(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.3, 0.7]), 1.0).round(6).tolist()
    [0.5, 0.5]
    """
    if epsilon == 0 or len(prior) == 1:
        return prior
    found = minimize(
        lambda x: x @ gram @ x,
        prior,
        jac=lambda x: 2 * gram @ x,
        method="SLSQP",
        bounds=list(zip(np.maximum(prior - epsilon, 0), np.minimum(prior + epsilon, 1), strict=True)),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    weights = np.clip(found.x, 0, 1)
    normed: FloatArray = weights / weights.sum()
    return normed
