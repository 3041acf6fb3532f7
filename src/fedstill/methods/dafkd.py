"""DaFKD: Wang et al., "Domain-aware federated knowledge distillation", 2023."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from fedstill.aggregate.mean import weighted_mean
from fedstill.core import seeds
from fedstill.core.errors import SettingError
from fedstill.core.space import Search
from fedstill.core.tree import Message
from fedstill.core.weights import FlatNet
from fedstill.distill.adversarial import AdversarialTraining, Discriminator
from fedstill.distill.auxiliary import Auxiliary, Generator
from fedstill.distill.ensemble import normalised
from fedstill.distill.generators import check_image_shape, dafkd_generator, dcgan_init
from fedstill.distill.stage import match_probabilities, mean_logits, mean_probabilities
from fedstill.methods.base import Needs, Part, Server, Uplink, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.server_side import Distilling
from fedstill.train.client import Client
from fedstill.train.evaluate import Outputs, predict, require_features
from fedstill.train.loop import Objective, steps_of
from fedstill.train.optimizers import Adam
from fedstill.train.task import Samples, Task, classifier

Variant = Literal["full", "no-sharing", "no-correlation", "no-distill"]


@dataclass(frozen=True)
class DaFKD(Distilling):
    """Each client's discriminator says how much its model counts for each generated sample.

    Where clients have different networks, all groups have one generator, the mean of all clients' (it makes images, of
    which no network's weights are part), and all clients teach one student for each network. A discriminator stays
    its client's own and reads the features of the client's own network: heads of different widths are never averaged,
    only their outputs D_k(x_i) are compared.
    """

    name: ClassVar[str] = "dafkd"
    paper: ClassVar[str] = "Wang et al. 2023"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    server_keys: ClassVar[tuple[str, ...]] = ("generator",)
    client_keys: ClassVar[tuple[str, ...]] = ("discriminator",)
    teaches_groups: ClassVar[bool] = True
    streams: ClassVar[tuple[str, ...]] = ("adversarial noise",)

    uniform: Annotated[bool, "average classifiers and generators uniformly (Eq. 4, 6), not by sample counts"] = True
    variant: Annotated[Variant, "full, or an ablation: no-sharing (of the trunk), no-correlation, no-distill"] = "full"
    private: Annotated[
        bool, "clients send weighted predictions, not their discriminators, which these still give away"
    ] = False
    conditional: Annotated[bool, "the generator has a label as a further input, drawn at random"] = False
    generator_width: Annotated[int, Ge(0), "most channels of its layers; 0: 256, of the conditional one 128"] = 0
    z_dim: Annotated[int, Ge(1), "d: dimension of the noise"] = 100
    generator_lr: Annotated[float, Gt(0), Search("log:1e-4..1e-2"), "learning rate of the generator (Adam)"] = 1e-3
    generator_beta1: Annotated[float, Ge(0), Lt(1), "decay of its Adam's mean of gradients; DCGAN: 0.5"] = 0.9
    generator_beta2: Annotated[float, Ge(0), Lt(1), "decay of its Adam's mean of squared gradients"] = 0.999
    dcgan_init: Annotated[bool, "the generator's first weights have deviation 0.02, as in DCGAN"] = False
    penalty: Annotated[float, Ge(0), "weight of the gradient penalty, (|grad D(x)| - 1)^2 of each sample"] = 0.0
    adv_rounds: Annotated[int, Ge(0), "train generator and discriminators only in the first rounds; 0: in all"] = 0
    adv_epochs: Annotated[int, Ge(0), "and only in a round's first epochs; 0: in all"] = 0
    batches: Annotated[int, Ge(1), "generated batches a round for the distillation"] = 40
    server_batch: Annotated[int, Ge(2), "B: samples in each, and the batch size of the distillation"] = 32
    logit_T: Annotated[float, Ge(0), "average logits, matched at this temperature; 0: probabilities (Eq. 8)"] = 0.0
    server_epochs: Annotated[int, Ge(0), "epochs of the distillation"] = 5

    def check(self, task: Task) -> None:
        check_image_shape(task.dataset.shape)
        require_features(task, "dafkd")
        if self.private and not self.judged:
            raise SettingError(f"dafkd: private sends predictions weighted by a discriminator; {self.variant} has none")
        if self.private and self.logit_T:
            raise SettingError("dafkd: private sends predictions, of which logit_T cannot make logits again")
        super().check(task)

    # --- what crosses -------------------------------------------------------------------------------------------

    @property
    def beyond_steps(self) -> str:
        return "dafkd also trains a discriminator on the samples"

    def wire(self, task: Task) -> Wire:
        def weights(name: str, network: Auxiliary) -> dict[str, Part]:
            return {name: Part((network.net.size,), name, task.dtype, kind=Kind.GENERATOR)}

        inner, generator = super().wire(task), weights("generator", self.generator(task))
        up = inner.up | generator
        if self.judged and self.private:
            shape = (self.batches * self.server_batch, task.classes)
            up |= {"predictions": Part(shape, "weighted predictions", task.dtype, optional=True, kind=Kind.PREDICTIONS)}
        elif self.judged:
            up |= weights("discriminator", self.discriminator(task))
        return Wire(inner.down | generator, up)

    @property
    def judged(self) -> bool:
        """Whether the server needs to know the outputs of the discriminators."""
        return self.variant in ("full", "no-sharing")

    def needs(self) -> Needs:
        revealed = "a generator trained on its data"
        if self.judged and self.private:
            revealed += ", and weighted predictions of which its discriminator can be worked out"
        elif self.judged:
            revealed = "a generator and a discriminator trained on its data"
        inner = self.inner.needs()
        return replace(inner, extra_information=(*inner.extra_information, revealed))

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["generator"] = self.generator(server.task).initial()

    def downlink(self, server: Server) -> Message:
        return super().downlink(server) | {"generator": server.state["generator"]}

    # --- client -------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        """The inner method's, plus telling the client's data from generated samples; generator and all learn."""
        task = client.task
        generator, discriminator = self.generator(task), self.discriminator(task)
        params = generator.load(client.down["generator"]).params
        head = client.state.get("discriminator")
        judge = discriminator.load(discriminator.initial() if head is None else head).module
        assert isinstance(judge, Discriminator)
        inner = super().objective(client)
        if self.adv_rounds and client.round > self.adv_rounds:
            return inner
        adam = Adam(params, self.generator_lr, betas=(self.generator_beta1, self.generator_beta2))
        noise, epoch = client.stream("adversarial noise"), steps_of(len(client.data), task.local) // task.local.epochs
        steps = self.adv_epochs * epoch if self.adv_epochs else None
        return inner + AdversarialTraining(generator, judge, client.net, adam, noise, self.penalty, steps).objective()

    def uplink(self, client: Client) -> Message:
        task = client.task
        client.state["discriminator"] = self.discriminator(task).net.read()  # a private head, kept between rounds
        up = super().uplink(client) | {"generator": self.generator(task).net.read()}
        if not self.judged or (self.private and client.round == 1):  # the first round is not distilled
            return up
        if not self.private:
            return up | {"discriminator": client.state["discriminator"]}
        pseudo = self.pseudo(task, client.down["generator"], client.round)
        predicted = predict(task, up["model"], pseudo)
        weight = self.correlations([(task, client.state["discriminator"])], [predicted], pseudo)[0]
        return up | {"predictions": weight.unsqueeze(1) * predicted.logits.softmax(1)}

    # --- server -------------------------------------------------------------------------------------------------

    def across_groups(self, servers: Sequence[Server]) -> None:
        active = [server for server in servers if self.name in server.ensembles]
        super().across_groups(servers)
        for server in servers if active else ():  # those of which no client was drawn get it too
            server.state["generator"] = active[0].state["generator"]

    def improve_all(self, servers: Sequence[Server], uplinks: list[Uplink]) -> None:
        first, by_samples = servers[0], ((up["generator"], 1 if self.uniform else up.samples) for up in uplinks)
        task, old_generator, generator = first.task, first.state["generator"], weighted_mean(by_samples)  # Eq. 4
        for server in servers:
            server.state["generator"] = generator
        if first.round == 1 or self.variant == "no-distill" or self.server_epochs == 0:
            return
        if self.private:
            # A client may leave out what the first round does not need; one that does so later has no say.
            predictions = [up["predictions"] for up in uplinks if "predictions" in up.message]
            if not predictions:
                return
            pseudo = self.pseudo(task, old_generator, first.round)  # the set that clients drew from the same seed
            weighted = torch.stack(predictions).double().sum(0) + 1e-8 / task.classes
            targets = (weighted / weighted.sum(1, keepdim=True)).float()
        else:
            pseudo = self.pseudo(task, generator, first.round)
            outputs = first.outputs_of(uplinks, pseudo)
            weights = None
            if self.judged:
                judges = [(up.task or task, up["discriminator"]) for up in uplinks]
                weights = normalised(self.correlations(judges, outputs, pseudo))
            if self.logit_T:
                targets = (mean_logits(outputs, weights) / self.logit_T).softmax(1)
            else:
                targets = mean_probabilities(outputs, weights)  # Eq. 8
        for server in servers:
            self.distil(server, pseudo, match_probabilities(targets, self.logit_T or 1.0), epochs=self.server_epochs)

    @torch.no_grad()
    def correlations(
        self, judges: Sequence[tuple[Task, Tensor]], outputs: Sequence[Outputs], pseudo: Samples
    ) -> Tensor:
        """alpha_{k,i} = D_k(x_i), (K, N), on the features that client k's own trained trunk gives."""
        x = pseudo.x(torch.arange(len(pseudo)))
        pairs = zip(judges, outputs, strict=True)
        return torch.stack([self._logits(task, weights, x, out).sigmoid() for (task, weights), out in pairs])

    def _logits(self, task: Task, weights: Tensor, x: Tensor, out: Outputs) -> Tensor:
        found: Tensor = self.discriminator(task).load(weights).module.eval()(x, out.features)
        return found

    def pseudo(self, task: Task, generator: Tensor, round_: int) -> Samples:
        """The generated samples of a round, the same for whoever has the generator."""
        noise = seeds.torch_rng(task.seed, "pseudo set", round_)
        return self.generator(task).samples(generator, self.batches, self.server_batch, noise)

    # --- networks -----------------------------------------------------------------------------------------------

    def generator(self, task: Task) -> Generator:
        shape = task.dataset.shape

        def make() -> nn.Module:
            net = dafkd_generator(shape, self.z_dim, task.classes if self.conditional else 0, self.generator_width)
            return net.apply(dcgan_init) if self.dcgan_init else net

        role = f"dafkd generator {self.z_dim} {self.conditional} {self.dcgan_init} {self.generator_width}"
        return Generator(task, role, "generator", make, self.z_dim, self.conditional)

    def discriminator(self, task: Task) -> Auxiliary:
        def make() -> nn.Module:
            trunk = classifier(FlatNet(task.make_network())) if self.variant == "no-sharing" else None
            return Discriminator(task.feature_dim, trunk)

        return Auxiliary(task, f"discriminator {self.variant == 'no-sharing'}", "discriminator", make)

    def pictures(self, task: Task, state: dict[str, Any], count: int) -> Tensor | None:
        if "generator" not in state:
            return super().pictures(task, state, count)
        return self.generator(task).pictures(state["generator"], count, seeds.torch_rng(task.seed, "pictures"))

    @torch.no_grad()
    def realness(self, task: Task, message: Message, samples: Samples) -> Tensor | None:
        if "discriminator" not in message:
            return super().realness(task, message, samples)
        x, out = samples.x(torch.arange(len(samples))), predict(task, message["model"], samples)
        return self._logits(task, message["discriminator"], x, out)
