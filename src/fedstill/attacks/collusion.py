"""Attackers that collude: they know what every honest client of the round sends, and all send the same.

That is the strongest attacker that papers assume. Below, mu and sigma are mean and standard deviation of the honest
clients' models, number by number, and s is `attack_scale`:

- alie: mu - s sigma. Baruch et al., "A little is enough", 2019.
- ipm: w_t - s (mu - w_t). Xie et al., "Fall of empires", 2020.
- min-max: mu - g (mu - w_t) with the largest g that leaves it no further from any honest model than two of these are
  apart. Shejwalkar and Houmansadr, "Manipulating the Byzantine", 2021.
- adaptive: knows the server's rule, and sends whichever of the above, at several strengths, takes the mean of what the
  rule lets through furthest back along mu - w_t.

BatchNorm's statistics and other parts stay as the attackers learnt them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_STRENGTHS = (0.5, 1.0, 1.5, 3.0, 10.0)


class Knowledge:
    """What colluding attackers know of a round."""

    def __init__(self, w_t: Tensor, honest: Tensor) -> None:
        self.w_t, self.honest = w_t, honest  # (weights,), (clients, weights)
        self.mean, self.std = honest.mean(0), honest.std(0, correction=0)

    def sent(self, kind: str, scale: float) -> Tensor:
        """The weights that all of them send."""
        if kind == "alie":
            return self.mean - scale * self.std
        if kind == "ipm":
            return self.w_t - scale * (self.mean - self.w_t)
        return self.mean - self.furthest() * (self.mean - self.w_t)

    def furthest(self) -> float:
        """The largest g with ||mu - g d - w_k|| <= max_ij ||w_i - w_j|| for all k, d = mu - w_t: each a quadratic."""
        d, away = self.mean - self.w_t, self.mean - self.honest
        a, b = d.square().sum(), away @ d  # g^2 a - 2 g b_k + ||away_k||^2 - D^2 <= 0
        apart = max(float((self.honest - w).square().sum(1).max()) for w in self.honest)
        c = away.square().sum(1) - apart
        return float(((b + (b.square() - a * c).clamp(min=0).sqrt()) / a).min()) if a else 0.0

    def candidates(self) -> Iterator[Tensor]:
        """What an attacker who can try them all chooses from."""
        yield self.sent("min-max", 1)
        for strength in _STRENGTHS:
            yield self.sent("alie", strength)
            yield self.sent("ipm", strength)

    def gain(self, model: Tensor) -> float:
        """How far an aggregate goes along the honest clients' mean update; attackers want little."""
        return float(torch.dot(model[: len(self.w_t)].double() - self.w_t, self.mean - self.w_t))
