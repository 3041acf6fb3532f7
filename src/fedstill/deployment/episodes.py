"""The global server's run where regions are on machines of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from fedstill.building.topology import Region
from fedstill.core.tree import Message, Tree
from fedstill.engine.base import Engine
from fedstill.engine.worker import Train
from fedstill.methods.base import Part
from fedstill.running.loop import RoundLoop
from fedstill.running.records import Tally
from fedstill.running.uplinks import Checked, TooFewClients

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
        # Updates of equal networks are compared with each other.
        separate = self.setup.hierarchy.separate
        alike = [[region] for region in chosen] if separate else [chosen]
        downs = [{"model": (self.regional[each[0].number] if separate else self.server).model} for each in alike]
        answers = engine.run_all(
            [
                ([Train(int(r.clients[0]), round_, measure, r.number) for r in regions], down)
                for regions, down in zip(alike, downs, strict=True)
            ]
        )
        tally, dropped = Tally(), dict[int, str]()
        self._regional_models = dict[int, Tensor]()
        for regions, down, own in zip(alike, downs, answers, strict=True):
            dropped |= self._receive(engine, regions, down, own, tally)
        if not self._regional_models:
            raise TooFewClients(0, len(chosen), 1, dropped, "region")
        tally.left_out = [region.name for region in chosen if region.number not in self._regional_models]
        return tally, [region for region in chosen if region.number in self._regional_models]

    def _receive(
        self, engine: Engine, regions: Sequence[Region], down: Message, answers: Iterator[Tree], tally: Tally
    ) -> dict[int, str]:
        """Take in the models of regions with one network, and what they report; who was dropped, and why."""
        where = f"regions with the network of {regions[0].name}" if self.setup.hierarchy.separate else "regions"
        received = Checked(
            [region.number for region in regions],
            answers,
            {"model": Part((regions[0].task.size,), "the region's model")},
            least=0,
            tick=self.client_done,
            who="region",
            judge=self.judge(engine, down, where),
        )
        self._regional_models |= {answer.client: answer["model"] for answer in received}
        for name in TOTALS:
            counted = sum(int(min(max(n, 0.0), _MOST)) for n in received.metrics.pop(name, []))
            setattr(tally, name, getattr(tally, name) + counted)
        for name, values in received.metrics.items():
            tally.metrics.setdefault(name, []).extend(values)
        return received.dropped

    def promise(self, tally: Tally) -> dict[str, Any] | None:
        """That of the region that spent most, as it reports; each ends by itself before it spends more than it may."""
        if not any(region.method.guarantee for region in self.setup.hierarchy.regions):
            return None
        return {"epsilon": max(tally.metrics.get("epsilon", []), default=None), "reported by": "the regions"}

    def spent(self, round_: int) -> str:
        return ""

    def regional_model(self, region: Region) -> Tensor:
        return self._regional_models[region.number]
