"""The tables of a configuration that may stand there several times: `[[columns]]`, `[[region]]`, `[[group]]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator


class ColumnSettings(BaseModel):
    """A column of a table; what is not said of it is found by sums over the clients' training samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    categories: list[str] | None = Field(None, description="of categories: which; none in the list: those that occur")
    mean: float | None = None
    std: float | None = Field(None, gt=0)
    missing: bool | None = Field(None, description="whether an input says that a number is missing")

    @property
    def complete(self) -> bool:
        """Whether nothing has to be found."""
        known = (self.mean, self.std, self.missing)
        return None not in known if self.categories is None else bool(self.categories)


class RegionSettings(BaseModel):
    """What one region has of its own; what is not set is as in the rest of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = ""
    clients: NonNegativeInt | list[NonNegativeInt] = Field(
        0, description="how many clients, or which; 0: an equal share"
    )
    joins: int = Field(1, ge=1, description="its first round")
    leaves: int = Field(0, ge=0, description="the first round without it; 0: it stays")
    model: str = Field("", description="the network of the region's clients; empty: as in the rest of the run")
    model_options: dict[str, Any] = Field(default_factory=dict, description="beside those of the run")
    method: str = Field("", description="the method inside the region")
    hyper: dict[str, Any] = Field(default_factory=dict, description="that method's own settings")
    participation: float | None = Field(None, gt=0, le=1)
    epochs: int | None = Field(None, ge=1)
    batch_size: int | None = Field(None, ge=1)
    optimizer: Literal["sgd", "adam"] | None = None
    lr: float | None = Field(None, gt=0)
    momentum: float | None = Field(None, ge=0, lt=1)
    weight_decay: float | None = Field(None, ge=0)

    def overrides(self) -> dict[str, Any]:
        """The settings of the run that have another value in the region."""
        names = ("participation", "epochs", "batch_size", "optimizer", "lr", "momentum", "weight_decay")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class GroupSettings(BaseModel):
    """A group of clients with a network of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field("", description="what records and tables call it; empty: as its network")
    model: str
    model_options: dict[str, Any] = Field(default_factory=dict, description="beside those of the run")
    clients: NonNegativeInt | list[NonNegativeInt | str] = Field(
        0, description="how many clients, or which, by number or name; 0: an equal share of those that are left"
    )
    share: float = Field(0.0, ge=0, lt=1, description="instead of clients: which share of them")

    @model_validator(mode="after")
    def _one_of_two(self) -> GroupSettings:
        if self.clients and self.share:
            raise ValueError("clients and share both say which clients it has; leave one out")
        return self
