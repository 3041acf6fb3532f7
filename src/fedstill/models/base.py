"""The contract of a network, and how a user's own module comes to fulfil it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.errors import SettingError


class Classifier(nn.Module):
    """A network whose logits are `head(features(x))`.

    A subclass sets `head` and `feature_dim` and defines `features`.
    """

    head: nn.Module
    feature_dim: int
    precision: torch.dtype | None = None  # in which a pass is computed where that is enough; None: that of the weights

    def features(self, x: Tensor) -> Tensor:
        """The penultimate features, (B, feature_dim)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The logits, (B, classes)."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features in one pass."""
        features = self.features(x)
        return self.head(features), features


def frozen_digest(module: nn.Module) -> str:
    """What tells the parameters that are not trained from others; empty if there are none.

    >>> frozen_digest(nn.Linear(2, 2))
    ''
    """
    digest, frozen = hashlib.sha256(), [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
    for name, parameter in frozen:
        values = parameter.detach().contiguous()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""


class Stacked(Classifier):
    """A body that computes the features, and a head.

    >>> net = Stacked(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2), feature_dim=3)
    >>> net.features(torch.ones(5, 1, 2, 2)).shape, net(torch.ones(5, 1, 2, 2)).shape
    (torch.Size([5, 3]), torch.Size([5, 2]))
    """

    def __init__(self, body: nn.Module, head: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.feature_dim = feature_dim

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features


class Wrapped(Classifier):
    """A plain module seen as a classifier; its features are what enters its last `nn.Linear`.

    The user's module is `self.module`, so `state_dict()` holds the user's own keys, each behind `module.`.
    One copy must not compute features in two threads at once, unless the module is a plain `nn.Sequential`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    # The last Linear is looked up by walking self.module each time: a stored reference or a lasting hook
    # would, after a copy or after the user replaced that layer, look at the wrong network.
    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        """The module's last `nn.Linear`."""
        return self._last_linear()[1]

    @property
    def feature_dim(self) -> int:  # type: ignore[override]
        """The width of what enters the last `nn.Linear`."""
        return self.head.in_features

    def features(self, x: Tensor) -> Tensor:
        features = self._tapped(x)[1]
        if features is None:
            raise SettingError(
                f"no features for {type(self.module).__name__}: its output is not that of its last Linear layer, "
                f"{self._last_linear()[0]!r}; derive it from fedstill.models.Classifier and define features()"
            )
        return features

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features in one pass; features of width 0 where the module has none to show."""
        if not any(isinstance(layer, nn.Linear) for layer in self.module.modules()):
            logits: Tensor = self.module(x)
            return logits, logits.new_empty(len(logits), 0)
        logits, features = self._tapped(x)
        return logits, logits.new_empty(len(logits), 0) if features is None else features

    def _tapped(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The module's output, and what entered its last Linear if that is what gave the output."""
        module, linear = self.module, self._last_linear()[1]
        # Not children(), which leaves out a layer that is used a second time.
        layers = list(module) if isinstance(module, nn.Sequential) else []
        if type(module).forward is nn.Sequential.forward and layers[-1] is linear:
            for layer in layers[:-1]:
                x = layer(x)
            return linear(x), x

        seen: list[tuple[Tensor, Tensor]] = []  # input and output of each call of the Linear

        def tap(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            seen.append(((*inputs, *named.values())[0], output))

        handle = linear.register_forward_hook(tap, with_kwargs=True)
        try:
            logits: Tensor = module(x)
        finally:
            handle.remove()
        if not seen or not (seen[-1][1] is logits or torch.equal(seen[-1][1], logits)):
            return logits, None
        return logits, seen[-1][0]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x)
        return logits

    def _last_linear(self) -> tuple[str, nn.Linear]:
        for name, layer in reversed(list(self.module.named_modules())):
            if isinstance(layer, nn.Linear):
                return name, layer
        raise SettingError(
            f"no features for {type(self.module).__name__}: it has no Linear layer; "
            "derive it from fedstill.models.Classifier and define features()"
        )


def as_classifier(module: nn.Module) -> Classifier:
    """The module itself if it is a `Classifier`, else the module wrapped; the logits stay the same.

    A module without an `nn.Linear` at its end still gives logits, but asking it for features is a
    `SettingError`. The wrapper's state dict has the module's keys, each behind `module.`.

    >>> net = as_classifier(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> net.feature_dim, list(net.state_dict())[0]
    (3, 'module.0.weight')
    """
    return module if isinstance(module, Classifier) else Wrapped(module)
