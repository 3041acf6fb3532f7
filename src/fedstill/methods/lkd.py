"""LKD, MTKD and F2L: Nguyen et al., "Towards scalable and non-IID robust hierarchical federated learning …", 2022."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor
from torch.nn import functional as F

from fedstill.core import seeds
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.distill.reliability import among_teachers, class_auc
from fedstill.distill.split import Split, split_by_use
from fedstill.methods.base import Method, Server, Uplink
from fedstill.methods.server_side import Distilling
from fedstill.train.evaluate import Outputs, predict
from fedstill.train.loop import Batch, Loss
from fedstill.train.losses import SoftTargets

_STUDENT = "student"  # of a region with a network of its own: what the last episode ended with


@dataclass(frozen=True)
class LKD(Distilling):
    """Regions (or clients) teach the global model, each by its reliability on the class it predicts."""

    name: ClassVar[str] = "lkd"
    paper: ClassVar[str] = "Nguyen et al. 2022"
    needs_server_labels: ClassVar[bool] = True
    teaches_groups: ClassVar[bool] = True
    stage: ClassVar[str] = "lkd"  # what a distillation is called in the records
    order_stream: ClassVar[str] = "label-driven distillation"
    server_keys: ClassVar[tuple[str, ...]] = (_STUDENT,)

    Tw: Annotated[float, Ge(0), "how sharply reliability counts; 0: all teachers alike"] = 4.0
    T: Annotated[float, Gt(0), Search("1..5"), "temperature of the distillation"] = 3.0
    lambda3: Annotated[
        float, Ge(0), Le(1), Search("log:0.01..1"), "weight of the labels; the teachers' follow from it"
    ] = 0.01
    update: Annotated[bool, "the old global model teaches too (Eq. 4)"] = True
    student_init: Annotated[Literal["avg", "old"], "start from the average, or from the old global model"] = "avg"
    server_frac: Annotated[float, Gt(0), Le(1), "share of the server's pool that is used"] = 1.0
    pool_choice: Annotated[Literal["proportional", "balanced"], "classes of that share: as in the pool, or even"] = (
        "proportional"
    )
    labelled_frac: Annotated[float, Gt(0), Le(1), "share of it whose labels may be used"] = 1.0
    val_split: Annotated[float, Ge(0), Lt(1), "share of the labelled kept for reliability alone; 0: all serve both"] = (
        0.0
    )
    server_epochs: Annotated[int, Ge(0), "epochs of the distillation"] = 10

    # --- where the teachers come from -----------------------------------------------------------------------------

    def regional(self) -> Method:
        """Inside a region the inner method runs alone; the regions' models are the teachers."""
        return self.inner.regional()

    def merge(self, server: Server, models: Sequence[Tensor]) -> None:
        old = server.model
        super().merge(server, models)
        self.teach(server, old, models)

    def merge_networks(self, servers: Sequence[Server], regions: Sequence[Uplink]) -> None:
        """Where regions have different networks, all teach one student for each network.

        It begins as the mean of the regions that have the network. If F2L finds that regions agree, it stays so: models
        are averaged inside equal networks only.
        """
        began, pool = time.perf_counter(), self.pool(servers[0])
        outputs = servers[0].outputs_of(regions, pool.samples)
        old = [server.state.get(_STUDENT, server.task.initial) for server in servers]
        super().merge_networks(servers, regions)
        taught: dict[int, Server] = {}
        for server, before in zip(servers, old, strict=True):
            first = taught.setdefault(id(server.task.nets), server)
            if first is server:
                self.distil_outputs(server, before, pool, outputs, began)
            server.model, server.state[_STUDENT] = first.model, first.model
            server.notes = first.notes

    def improve(self, server: Server, uplinks: list[Uplink]) -> None:
        """In a federation without regions, the clients' models are the teachers."""
        self.teach(server, server.before, [up["model"] for up in uplinks])

    def improve_all(self, servers: Sequence[Server], uplinks: list[Uplink]) -> None:
        """Where networks differ, all clients teach each group's."""
        began, pool = time.perf_counter(), self.pool(servers[0])
        outputs = servers[0].outputs_of(uplinks, pool.samples)
        for server in servers:
            self.distil_outputs(server, server.before, pool, outputs, began)

    # --- what they teach ------------------------------------------------------------------------------------------

    def teach(self, server: Server, old: Tensor, teachers: Sequence[Tensor]) -> None:
        """Distil the teachers, and the old model, into `server.model`, which is their average so far."""
        began, pool = time.perf_counter(), self.pool(server)
        outputs = server.predict_all(teachers, pool.samples)  # once; so is everything that follows from them
        self.distil_outputs(server, old, pool, outputs, began)

    def distil_outputs(
        self, server: Server, old: Tensor, pool: Split, outputs: Sequence[Outputs], began: float
    ) -> None:
        """The same, given what the teachers make of the pool; it began at this moment of the clock."""
        auc = torch.stack([class_auc(a.logits[pool.check], pool.samples.y[pool.check]) for a in outputs])
        beta = among_teachers(auc, self.Tw)
        gap = beta.max(0).values - beta.min(0).values
        distils = self.distils(gap)
        if distils and self.server_epochs:
            start = server.model if self.student_init == "avg" else old
            loss = self.joint_loss(server, pool, outputs, beta, old)
            self.distil(server, pool.samples.take(pool.train), loss, epochs=self.server_epochs, start=start)
        server.notes |= {
            "stage": self.stage if distils and self.server_epochs else "average",
            "disagreement": self.disagreement(gap),
            "reliability": auc.tolist(),
            "server_seconds": time.perf_counter() - began,
        }

    def distils(self, gap: Tensor) -> bool:
        """Whether the teachers differ enough, class by class, for distillation."""
        return True

    def disagreement(self, gap: Tensor) -> float:
        return float(gap.max())

    def joint_loss(self, server: Server, pool: Split, outputs: Sequence[Outputs], beta: Tensor, old: Tensor) -> Loss:
        """lambda1 sum_r L_r + lambda2 L_upd + lambda3 L_CE (Eq. 9), each a mean over the batch."""
        logits = torch.stack([a.logits[pool.train] for a in outputs])  # (R, N, C)
        lambda1, lambda2 = self.coefficients(len(outputs))
        by_teachers = SoftTargets.of(logits, by_prediction(beta, logits).to(logits.dtype), self.T)
        by_old = self.from_old(server, pool, old) if self.update else None

        def loss(batch: Batch, out: Outputs) -> Tensor:
            total = lambda1 * by_teachers.loss(batch.ids, out.logits).mean()
            if by_old is not None:
                total = total + lambda2 * by_old(batch.ids, out.logits).mean()
            if self.lambda3:
                known = pool.labelled[batch.ids]
                hard = F.cross_entropy(out.logits[known], batch.y[known], reduction="sum")
                total = total + self.lambda3 * hard / max(1, int(known.sum()))
            return total

        return loss

    def coefficients(self, teachers: int) -> tuple[float, float]:
        """lambda1 and lambda2, which with lambda3 add up to 1; lambda2 is lambda1 / R, or 0 (Eq. 11, 12)."""
        if not self.update:
            return 1 - self.lambda3, 0.0
        lambda1 = (1 - self.lambda3) * teachers / (teachers + 1)
        return lambda1, lambda1 / teachers

    def from_old(self, server: Server, pool: Split, old: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """beta_old KL(old || student) of each sample; beta_old compares the two anew in every epoch (Eq. 4, 8)."""
        task, y = server.task, pool.samples.y[pool.check]
        check_samples = pool.samples.take(pool.check)
        outputs = predict(task, old, pool.samples)
        own = outputs.logits[pool.train].unsqueeze(0)
        old_auc = class_auc(outputs.logits[pool.check], y)
        lesson, seen = SoftTargets.of(own, torch.ones(own.shape[:2], dtype=own.dtype), self.T), 0
        weight = torch.empty(0)

        def loss(ids: Tensor, student: Tensor) -> Tensor:
            nonlocal weight, seen
            if seen % len(pool.train) == 0:  # a new epoch
                now = predict(task, task.nets.get("distilled").read(), check_samples)
                pair = among_teachers(torch.stack([old_auc, class_auc(now.logits, y)]), self.Tw)
                weight = by_prediction(pair[:1], own)[0].to(own.dtype)
            seen += len(ids)
            return weight[ids] * lesson.loss(ids, student)

        return loss

    def pool(self, server: Server) -> Split:
        """The server's samples by their use: the same in every round."""
        assert server.pool is not None
        rng, even = seeds.torch_rng(server.task.seed, "lkd pool"), self.pool_choice == "balanced"
        split = split_by_use(server.pool, self.server_frac, even, self.labelled_frac, self.val_split, rng)
        if not len(split.check) or not len(split.train):
            raise SettingError(
                f"{self.name}: of {len(server.pool)} pool samples none is left to check teachers on or to teach with; "
                "raise pool, or lower val_split"
            )
        return split


def by_prediction(beta: Tensor, logits: Tensor) -> Tensor:
    """Each teacher's weight for each sample: that of the class it predicts, (R, C) and (R, N, C) to (R, N)."""
    return beta.gather(1, logits.argmax(2))


@dataclass(frozen=True)
class MTKD(LKD):
    """As LKD with all teachers alike on every class: plain distillation from several teachers."""

    name: ClassVar[str] = "mtkd"
    stage: ClassVar[str] = "mtkd"

    Tw: Annotated[float, Ge(0), Le(0), "always 0 here: all teachers alike"] = 0.0
    update: Annotated[bool, "the old global model teaches too (Eq. 4)"] = False


@dataclass(frozen=True)
class F2L(LKD):
    """Regions teach the global model by LKD while they disagree on a class, and are averaged once they agree."""

    name: ClassVar[str] = "f2l"
    default_regions: ClassVar[int] = 3

    epsilon: Annotated[float, Ge(0), "the disagreement from which LKD is used"] = 0.1
    reduce: Annotated[Literal["max", "mean", "l2"], "how the classes' disagreements become one number"] = "max"

    def distils(self, gap: Tensor) -> bool:
        return self.disagreement(gap) >= self.epsilon

    def disagreement(self, gap: Tensor) -> float:
        """max_r beta_r^c - min_r beta_r^c over the classes."""
        return float({"max": gap.max(), "mean": gap.mean(), "l2": gap.norm()}[self.reduce])
