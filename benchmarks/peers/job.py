"""What a peer is asked to do and what it answers, as JSON on its command line and its standard output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.work import Work


@dataclass(frozen=True)
class Job:
    """Rounds of FedAvg in two processes; the last weights are written to `weights`, if that is a path."""

    work: Work
    rounds: int
    weights: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        work = fields.pop("work")
        return Job(work=Work(**work | {"shape": tuple(work["shape"])}), **fields)

    def answer(self, ends: Sequence[float], weights: dict[str, Tensor]) -> None:
        """Say how long each round took that has another before it, given when each ended."""
        if self.weights:
            torch.save({name: tensor.detach().contiguous() for name, tensor in weights.items()}, Path(self.weights))
        print(json.dumps([b - a for a, b in pairwise(ends)]), flush=True)
