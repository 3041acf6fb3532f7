"""FedAvg in Apple's pfl, on one of two processes that torchrun starts: each trains its half of the cohort.

As its documentation and benchmarks do for speed: users' data are tensors in memory, cut into batches once, and no
metrics are asked for. pfl does not shuffle, which saves it the copy of every batch. The layout is that of its examples
(`plain`), or the one which a user who knows the CPU kernels would set by hand (`channels-last`).
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")  # else it looks for a GPU at every batch

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.job import Job


class Trained(nn.Module):
    """The network with what pfl asks of one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


class Clock(TrainingProcessCallback):  # type: ignore[misc]  # pfl has no types here
    """When each round ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    layout, job = sys.argv[1], Job.from_json(sys.argv[2])
    memory_format = torch.contiguous_format if layout == "plain" else torch.channels_last
    work, net = job.work, job.work.network(memory_format)
    x, y = work.stored()
    x = x.contiguous(memory_format=memory_format)
    users = [PyTorchTensorDataset((x[work.samples_of(k)], y[work.samples_of(k)])) for k in range(work.clients)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(work.clients)))
    model = PyTorchModel(
        Trained(net),
        local_optimizer_create=partial(torch.optim.SGD, fused=True),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0, fused=True),
    )
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,  # the first round, which is not counted, asks for no metrics
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=None),
        model,
        NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch_size),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if os.environ["RANK"] == "0":
        job.answer(clock.ends, net.state_dict())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # pfl leaves it open, and a process that ends so sometimes aborts


if __name__ == "__main__":
    main()
