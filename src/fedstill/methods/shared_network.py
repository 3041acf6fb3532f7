"""What methods share in which one small network goes round and every client has another of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.distill.auxiliary import Auxiliary
from fedstill.methods.base import Part, Server, Wire
from fedstill.methods.kinds import Kind
from fedstill.methods.local import Local
from fedstill.models import Classifier, build
from fedstill.train.client import Client
from fedstill.train.task import Task


@dataclass(frozen=True)
class SharedNetwork(Local):
    """The server sends a network, and clients train it beside their own, which is the result.

    What goes up, and what becomes of it, is the method's to say.
    """

    extra_information: ClassVar[str] = "a shared network, not its own, trained on its data"
    server_keys: ClassVar[tuple[str, ...]] = ("shared",)

    shared: Annotated[str, "the network that is shared: a name, as of model"] = "cnn"

    @property
    def beyond_steps(self) -> str:
        return f"{self.name} also trains and sends a shared network"

    def check(self, task: Task) -> None:
        self.network_to_share(task).initial()

    def wire(self, task: Task) -> Wire:
        net = self.network_to_share(task).net
        words = "weights of the shared network"
        weights = Part((net.size,), words, net.vector.dtype, defence="any", kind=Kind.WEIGHTS)
        return Wire({"shared": weights}, {"shared": weights})

    def start(self, server: Server) -> None:
        server.state["shared"] = self.network_to_share(server.task).initial()

    def downlink(self, server: Server) -> Message:
        return {"shared": server.state["shared"]}

    def uplink(self, client: Client) -> Message:
        super().uplink(client)
        return {"shared": self.network_to_share(client.task).net.read()}

    def network_to_share(self, task: Task) -> Auxiliary:
        """The same for every client, whatever its own network."""

        def make() -> Classifier:
            data = task.dataset
            if self.shared == "distilbert":  # whose weights would be looked for, at sites too
                raise SettingError(f"shared = {self.shared!r}: what is shared is small, and begins with random weights")
            return build(self.shared, data.input_shape, task.classes, vocabulary=data.vocabulary)

        return Auxiliary(task, f"shared {self.shared}", "shared network", make)
