"""The global server's run where regions are on machines of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstill.building.topology import Region
from fedstill.engine.base import Engine
from fedstill.engine.worker import Train
from fedstill.methods.base import Part
from fedstill.running.loop import RoundLoop
from fedstill.running.records import Tally
from fedstill.running.uplinks import Checked

_MOST = 1e15  # of bytes, or anything else that a region counts

# Of an episode's rounds; a region reports them with its model.
TOTALS = ("clients", "bytes_down", "bytes_up", "dropped")


class EpisodeLoop(RoundLoop):
    """The global server's run: one step is an episode, whose rounds the regions run by themselves."""

    @property
    def rounds_per_step(self) -> int:
        return self.setup.hierarchy.rounds_per_episode

    @property
    def fewest_connected(self) -> int:
        return 1

    def train_regions(self, engine: Engine, round_: int, *, measure: bool) -> tuple[Tally, list[Region]]:
        self.server.round = round_
        if engine.poll_newcomers():
            self.count_samples()
        sizes, absent = self.setup.federation.sizes, engine.absent()
        with_data = [region for region in self.setup.hierarchy.regions if sizes[region.clients].any()]
        there = [region for region in with_data if not absent.issuperset(region.clients.tolist())]
        chosen = there or with_data  # who is waited for if nobody is there
        self.start_round(len(chosen))
        down = {"model": self.server.model}
        answers = Checked(
            [region.number for region in chosen],
            engine.run(
                [Train(int(region.clients[0]), round_, measure, region.number) for region in chosen],
                down,
            ),
            {"model": Part((self.setup.task.size,), "the region's model")},
            least=1,
            tick=self.client_done,
            who="region",
            judge=self.judge(engine, down, "regions"),
        )
        self._regional_models = {answer.client: answer["model"] for answer in answers}
        tally = Tally()
        for name in TOTALS:
            setattr(tally, name, sum(int(min(max(n, 0.0), _MOST)) for n in answers.metrics.pop(name, [])))
        tally.metrics = answers.metrics
        tally.left_out = [region.name for region in chosen if region.number not in self._regional_models]
        return tally, [region for region in chosen if region.number in self._regional_models]

    def promise(self, tally: Tally) -> dict[str, Any] | None:
        """That of the region that spent most, as it reports; each ends by itself before it spends more than it may."""
        if not any(region.method.guarantee for region in self.setup.hierarchy.regions):
            return None
        return {"epsilon": max(tally.metrics.get("epsilon", []), default=None), "reported by": "the regions"}

    def spent(self, round_: int) -> str:
        return ""

    def regional_model(self, region: Region) -> Tensor:
        return self._regional_models[region.number]
