"""CCVR: Luo et al., "No fear of heterogeneity: classifier calibration for federated learning …", 2021."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.methods.base import Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.modifier import Modifier
from fedstill.train.client import Client
from fedstill.train.evaluate import load_for_evaluation, predict, require_features
from fedstill.train.optimizers import SGD
from fedstill.train.task import Task, classifier

_STATE = "ccvr"


@dataclass(frozen=True)
class CCVR(Modifier):
    """After the last round, train the classifier again on features drawn from each class's Gaussian."""

    name: ClassVar[str] = "ccvr"
    paper: ClassVar[str] = "Luo et al. 2021"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    extra_information: ClassVar[str] = "mean, covariance and number of each class's features, once"
    server_keys: ClassVar[tuple[str, ...]] = ("ccvr",)
    streams: ClassVar[tuple[str, ...]] = ("virtual features", "calibration")

    virtual: Annotated[int, Ge(1), "features drawn of each class"] = 200
    calibration_epochs: Annotated[int, Ge(0), "epochs over them"] = 10
    calibration_lr: Annotated[float, Gt(0), Search("log:1e-3..0.1"), "learning rate of the classifier (SGD)"] = 0.01
    calibration_batch: Annotated[int, Ge(1), "batch size"] = 32

    def check(self, task: Task) -> None:
        super().check(task)
        require_features(task, "ccvr")
        if not self.inner.global_model:
            raise SettingError("ccvr calibrates the global model, and with this method there is none")

    def wire(self, task: Task) -> Wire:
        c, d = task.classes, task.feature_dim
        last = {
            "means": Part((c, d), "mean feature of each class", torch.float64, kind=Kind.STATISTICS),
            "covariances": Part((c, d, d), "covariance of each class's features", torch.float64, kind=Kind.STATISTICS),
            "counts": Part((c,), "samples of each class", torch.float64, least=0, kind=Kind.CLASS_COUNTS),
        }
        return replace(super().wire(task), last=last)

    @property
    def beyond_sums(self) -> str:
        return "ccvr asks every client once more after the last round"

    @property
    def beyond_steps(self) -> str:
        return "ccvr asks for statistics of the features of each class"

    @property
    def has_final_exchange(self) -> bool:
        return True

    def final_uplink(self, client: Client) -> Message:
        features = predict(client.task, client.down["model"], client.data).features.double()
        classes, d = client.task.classes, features.shape[1]
        means, covariances = torch.zeros(classes, d).double(), torch.zeros(classes, d, d).double()
        counts = torch.bincount(client.data.y, minlength=classes).double()
        for c in range(classes):
            own = features[client.data.y == c]
            if len(own):
                means[c] = own.mean(0)
            if len(own) > 1:
                covariances[c] = torch.cov(own.T).view(d, d)  # unbiased
        return {"means": means, "covariances": covariances, "counts": counts}

    def final_aggregate(self, server: Server, uplinks: Iterator[Uplink]) -> None:
        counts, means, covariances = pooled(uplinks)
        rng = server.stream("virtual features")
        features, labels = [], []
        for c in torch.nonzero(counts > 1).flatten().tolist():
            spread = root(covariances[c])
            noise = torch.randn(self.virtual, len(means[c]), generator=rng, dtype=torch.float64)
            features.append(means[c] + noise @ spread.T)
            labels.append(torch.full((self.virtual,), c))
        model = next(iter(super().models(server).values()))
        if not features:  # nobody has two samples of a class: there is nothing to calibrate on
            server.state[_STATE] = model
            return
        dtype = server.task.dtype
        server.state[_STATE] = self.calibrate(server, model, torch.cat(features).to(dtype), torch.cat(labels))

    def calibrate(self, server: Server, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The model with its classifier trained on these features; the rest stays."""
        net = load_for_evaluation(server.task, model, "calibrated")
        head = classifier(net).head
        sgd = SGD(head.parameters(), self.calibration_lr)
        order = server.stream("calibration")
        for _ in range(self.calibration_epochs):
            for ids in torch.split(torch.randperm(len(y), generator=order), self.calibration_batch):
                sgd.clear()
                F.cross_entropy(head(x[ids]), y[ids]).backward()
                sgd.step()
        return net.read()

    def models(self, server: Server) -> dict[str, Tensor]:
        plain = super().models(server)
        if _STATE not in server.state:
            return plain
        named = {"without CCVR" if name == "model" else name: model for name, model in plain.items()}
        return {"with CCVR": server.state[_STATE], **named}


def root(covariance: Tensor) -> Tensor:
    """A matrix L with L L^T the covariance plus 1e-6 I, or the nearest to it: what clients sent need not be one."""
    lower, failed = torch.linalg.cholesky_ex(covariance + 1e-6 * torch.eye(len(covariance), dtype=covariance.dtype))
    if not failed:
        found: Tensor = lower
        return found
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    scaled: Tensor = vectors * (values.clamp(min=0) + 1e-6).sqrt()
    return scaled


def pooled(uplinks: Iterator[Uplink]) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, means and unbiased covariances of each class over all clients' samples, from theirs.

    cov = sum_k (n_k - 1)/(n - 1) S_k + sum_k n_k/(n - 1) m_k m_k^T - n/(n - 1) m m^T
    """
    n, first, second = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for up in uplinks:
        n_k, m_k, s_k = up["counts"], up["means"], up["covariances"]
        n = n + n_k
        first = first + n_k.unsqueeze(1) * m_k
        outer = m_k.unsqueeze(2) * m_k.unsqueeze(1)
        second = second + (n_k - 1).clamp(min=0).view(-1, 1, 1) * s_k + n_k.view(-1, 1, 1) * outer
    mean = first / n.clamp(min=1).unsqueeze(1)
    centred = second - n.view(-1, 1, 1) * mean.unsqueeze(2) * mean.unsqueeze(1)
    return n, mean, centred / (n - 1).clamp(min=1).view(-1, 1, 1)
