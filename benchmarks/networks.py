"""What a round costs where clients have different networks: against what each network's clients cost by themselves."""

from __future__ import annotations

import numpy as np

import fedstill
from benchmarks.engine import Stopwatch
from benchmarks.work import Work
from fedstill.data.federation import Federation

WORK = Work(
    "12 clients with three networks", "", (1, 32, 32), clients=12, samples=200, cohort=12, batch_size=32, epochs=2
)
NETWORKS = ("lenet5", "cnn", "resnet8")
METHODS = ("fedavg", "fedprox+t1", "fedproto", "fml")


def of_clients(whole: Federation, clients: np.ndarray) -> Federation:
    """The same data with some of the clients alone."""
    index = np.concatenate([whole.train(int(k)) for k in clients])
    offsets = np.arange(len(clients) + 1) * WORK.samples
    none = np.zeros(0, np.int64)
    return Federation(whole.dataset, index, offsets, none, np.zeros_like(offsets), none)


def seconds(method: str, data: Federation, networks: tuple[str, ...], rounds: int) -> float:
    """Of the fastest round but the first and the last, in which other things happen."""
    watch = Stopwatch()
    fedstill.run(
        method,
        data=data,
        models=list(networks),
        model_options={"feature_size": 64},
        rounds=rounds + 2,
        participation=1.0,
        epochs=WORK.epochs,
        batch_size=WORK.batch_size,
        engine="inline",
        eval_every=0,
        callbacks=[watch],
    )
    return min(watch.seconds[:-1])


def round_costs(rounds: int, repeats: int) -> dict[str, tuple[float, float]]:
    """By method: a round with all networks, and the sum of those with one each, the best of several turns."""
    whole = WORK.federation(*WORK.data())
    everyone, found = np.arange(WORK.clients), {}
    for method in METHODS:
        together, apart = [], {network: list[float]() for network in NETWORKS}
        for _ in range(repeats):
            together.append(seconds(method, whole, NETWORKS, rounds))
            for number, network in enumerate(NETWORKS):
                own = of_clients(whole, everyone[number :: len(NETWORKS)])
                apart[network].append(seconds(method, own, (network,), rounds))
        found[method] = min(together), sum(map(min, apart.values()))
    return found
