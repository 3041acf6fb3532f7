"""Networks by name, checked against the input shape before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.core.errors import SettingError, unknown
from fedstill.models.base import Classifier
from fedstill.models.checks import whole, wholes
from fedstill.models.pretrained import distilbert
from fedstill.models.resnet import resnet8, resnet8_w64, resnet11, resnet18, resnet20, resnet32, resnet50
from fedstill.models.shufflenet import shufflenetv2
from fedstill.models.small import cnn, lenet5, mlp
from fedstill.models.text import bag, lstm, transformer


@dataclass(frozen=True)
class _Network:
    """How to make a network, and the images it takes, or that it takes text."""

    make: Callable[..., Classifier]
    smallest: int | None  # least height and width; None: any sample, image or not
    exact: int | None = None  # the only height and width
    text: bool = False


# Smallest sizes: cnn keeps one pixel at 16; the ResNets keep 2x2 (with their 3x3 stem), for GroupNorm with
# one channel per group turns a single pixel into zero; below 16 ShuffleNetV2 strides over single pixels.
_NETWORKS = {
    "bag": _Network(bag, smallest=None, text=True),
    "cnn": _Network(cnn, smallest=16),
    "distilbert": _Network(distilbert, smallest=None, text=True),
    "lenet5": _Network(lenet5, smallest=32, exact=32),
    "lstm": _Network(lstm, smallest=None, text=True),
    "mlp": _Network(mlp, smallest=None),
    "resnet8": _Network(resnet8, smallest=8),
    "resnet8-w64": _Network(resnet8_w64, smallest=8),
    "resnet11": _Network(resnet11, smallest=8),
    "resnet18": _Network(resnet18, smallest=16),
    "resnet20": _Network(resnet20, smallest=8),
    "resnet32": _Network(resnet32, smallest=8),
    "resnet50": _Network(resnet50, smallest=16),
    "shufflenetv2": _Network(shufflenetv2, smallest=16),
    "transformer": _Network(transformer, smallest=None, text=True),
}


def names() -> list[str]:
    """The names that `build` knows."""
    return list(_NETWORKS)


def image_size(name: str) -> int | None:
    """The height and width the network insists on, or None if it takes many.

    >>> image_size("lenet5"), image_size("resnet8")
    (32, None)
    """
    return _find(name).exact


def options(name: str) -> dict[str, Any]:
    """The network's options and their defaults.

    >>> options("mlp")
    {'hidden': (200, 200)}
    """
    parameters = inspect.signature(_find(name).make).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def build(name: str, shape: Sequence[int], classes: int, *, vocabulary: int = 0, **options: Any) -> Classifier:
    """A new network for samples of this shape, its weights drawn from the global torch generator.

    Where samples are text, rows of so many token numbers, `vocabulary` is how many tokens there are.

    >>> build("resnet8", (3, 32, 32), 10, norm="batch").feature_dim
    64
    >>> build("bag", (128,), 4, vocabulary=8000).feature_dim
    64
    """
    network = _find(name)
    _check_options(name, options)
    shape = wholes("the input shape", tuple(shape))
    _check_shape(name, network, shape, vocabulary)
    text = (vocabulary,) if network.text else ()
    try:
        return network.make(shape, whole("classes", classes, 1), *text, **options)
    except SettingError as error:
        raise SettingError(f"model {name!r}: {error}") from None


def _find(name: str) -> _Network:
    if name.endswith(".py"):
        raise SettingError(f"model = {name!r} names a file; name the function in it too: {name}:function")
    if name not in _NETWORKS:
        raise unknown("model", name, _NETWORKS)
    return _NETWORKS[name]


def _check_options(name: str, given: dict[str, Any]) -> None:
    allowed = options(name)
    for option in given:
        if option not in allowed:
            if not allowed:
                raise SettingError(f"model {name!r} has no options, got {option!r}")
            raise unknown(f"option of model {name!r}:", option, allowed)


def _check_shape(name: str, network: _Network, shape: tuple[int, ...], vocabulary: int) -> None:
    if not shape:
        raise SettingError(f"model {name!r} needs samples of at least one dimension, got single numbers")
    if network.text != bool(vocabulary):
        got = "x".join(map(str, shape))
        takes = ", ".join(n for n, other in _NETWORKS.items() if other.text)
        raise SettingError(
            f"model {name!r} needs text, got samples of {got}"
            if network.text
            else f"model {name!r} does not take text; those that do are {takes}"
        )
    if network.smallest is None:
        return
    got = "x".join(map(str, shape))
    if len(shape) != 3:
        hint = "; mlp takes rows of numbers" if len(shape) == 1 else ""
        raise SettingError(f"model {name!r} needs images of channels x height x width, got samples of {got}{hint}")
    if network.exact is not None and shape[1:] != (network.exact, network.exact):
        size = network.exact
        raise SettingError(f"model {name!r} needs images of {size}x{size}, got {got}; set image_size={size}")
    if min(shape[1:]) < network.smallest:
        size = network.smallest
        raise SettingError(
            f"model {name!r} needs images of at least {size}x{size}, got {got}; set image_size={size} or more"
        )
