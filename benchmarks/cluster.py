"""What Ray costs: rounds and the start of `--engine ray` beside worker processes, and rounds by the number of nodes."""

from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import Any

from benchmarks.engine import Stopwatch, fedstill_rounds, run
from benchmarks.work import Work
from fedstill.data.federation import Federation
from fedstill.engine import ray_connection


def rounds(work: Work, federation: Federation, n: int, repeats: int) -> tuple[list[float], list[float]]:
    """Medians of rounds with Ray and with processes, two workers each, taken in turn."""
    turns = [
        [median(fedstill_rounds(work, federation, n, engine=engine)) for engine in ("ray", "process")]
        for _ in range(repeats)
    ]
    return [ray for ray, _ in turns], [process for _, process in turns]


def start_seconds(work: Work, federation: Federation, engine: str) -> float:
    """From the call to the end of the first round, in a process that has imported everything."""
    watch, began = Stopwatch(), time.perf_counter()
    run(work, federation, 1, callbacks=[watch], engine=engine)
    return watch.ends[0] - began


def rounds_by_nodes(work: Work, federation: Federation, most: int, n: int) -> dict[int, float]:
    """A round on clusters of so many nodes, each with one core of this machine."""
    ray_connection.load("a cluster")
    from ray.cluster_utils import Cluster

    found = {}
    with tempfile.TemporaryDirectory(prefix="fs-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            for nodes in range(1, most + 1):
                if nodes > 1:
                    cluster.add_node(num_cpus=1)
                found[nodes] = median(
                    fedstill_rounds(work, federation, n, engine="ray", workers=nodes, ray_address=cluster.address)
                )
        finally:
            cluster.shutdown()
            del os.environ["RAY_TMPDIR"]
    return found
