"""Malicious clients: the labels they train on, and what they send in place of what they learnt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core import seeds
from fedstill.core.choices import AttackKind
from fedstill.core.errors import SettingError
from fedstill.core.tree import Message
from fedstill.core.weights import FlatNet

_LABELS = ("label-flip", "mirror-flip")
_COLLUDING = ("alie", "ipm", "min-max", "adaptive")
CLAIMED = 10**8  # samples, with `count`


@dataclass(frozen=True)
class Attack:
    """What some clients do; the others are honest. By default there is none."""

    kind: AttackKind = ""
    clients: frozenset[int] = frozenset()
    classes: int = 0
    target: int = 0  # the class that label-flip gives to every sample
    scale: float = 1.0  # of the noise, against each layer's own spread; of the update; what stands in buffers or parts

    @property
    def on_updates(self) -> bool:
        """Whether it changes what is sent, not the labels."""
        return self.kind not in ("", *_LABELS)

    @property
    def colludes(self) -> bool:
        """Whether attackers know what all others of the round send: see `fedstill.attacks.collusion`."""
        return self.kind in _COLLUDING

    def labels(self, client: int, y: Tensor) -> Tensor:
        """The labels as this client trains on them."""
        if client in self.clients and self.kind == "label-flip":
            return torch.full_like(y, self.target)
        if client in self.clients and self.kind == "mirror-flip":
            return self.classes - 1 - y
        return y

    def forged(
        self, message: Message, samples: int, w_t: Tensor, net: FlatNet, rng: torch.Generator
    ) -> tuple[Message, int]:
        """What an attacker sends, and how many samples it claims, having received w_t and learnt its message.

        Buffers stay as they are, but with `buffers`: beyond their range they would not mislead the global model but
        break it.
        """
        if self.kind == "extra":
            return {
                name: x if name == "model" else torch.full_like(x, self.scale) for name, x in message.items()
            }, samples
        w, trainable = message["model"], net.trainable
        sent = w.clone()
        if self.kind == "noise":
            for layer in net.split(sent):
                noise = torch.randn(layer.shape, generator=rng, dtype=layer.dtype)
                layer.add_(noise, alpha=self.scale * float(layer.std(correction=0)))
        elif self.kind == "buffers":
            sent[trainable:] = self.scale
        elif not self.colludes:  # those that do are heard on the server, when all have sent
            factor = self.scale if self.kind == "scale" else -self.scale
            sent[:trainable] = (w_t + factor * (w - w_t))[:trainable]
        return message | {"model": sent}, CLAIMED if self.kind == "count" else samples


def plan(
    kind: AttackKind, attackers: int, sizes: NDArray[np.int64], classes: int, *, target: int, scale: float, seed: int
) -> Attack:
    """The attack that the settings describe, on clients of these sizes."""
    if not kind and not attackers:
        return Attack()
    if not kind:
        raise SettingError(f"attackers = {attackers}: say what they do, for example attack=label-flip")
    if not attackers:
        raise SettingError(f"attack = {kind!r}: say how many clients do it, for example attackers=1")
    able = int(np.count_nonzero(sizes))
    if attackers > able:
        raise SettingError(f"attackers = {attackers}: only {able} clients have data")
    if kind == "label-flip" and target >= classes:
        raise SettingError(f"attack_class = {target}: the classes are 0 to {classes - 1}")
    if kind == "scale" and scale == 1:
        raise SettingError("attack_scale = 1.0: with attack=scale this changes nothing; set another factor")
    if not scale or (scale < 0 and kind != "scale"):
        raise SettingError(
            f"attack_scale = {scale}: with attack={kind} it should be above 0; below it, use attack=scale"
        )
    return Attack(kind, draw_attackers(sizes, attackers, seed), classes, target, scale)


def draw_attackers(sizes: NDArray[np.int64], count: int, seed: int) -> frozenset[int]:
    """So many of the clients that have data: the same for every method, and fewer are always among more."""
    able = np.flatnonzero(sizes)
    return frozenset(seeds.numpy_rng(seed, "attackers").permutation(able)[:count].tolist())
