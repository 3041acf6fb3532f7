"""FedGKD+: Yao et al., 2022, with MOON's projection head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods.fedgkd import FedGKD
from fedstill.models.base import Classifier
from fedstill.models.heads import Projected


@dataclass(frozen=True)
class FedGKDPlus(FedGKD):
    """FedGKD on the network with MOON's projection head."""

    name: ClassVar[str] = "fedgkd-plus"
    revision: ClassVar[int] = 1  # since features of LeNet-5 are its penultimate layer
    changes_model: ClassVar[bool] = True

    def network(self, net: Classifier) -> Classifier:
        return Projected(net)
