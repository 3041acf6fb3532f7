"""Datasets whose test images are a sixth of the training images, for choices that no test image may make.

    fedstill run dafkd --data tools/held_out.py:fashion_mnist

The files are looked for in $FEDSTILL_DATA, as ever; the published test images are not read into anything.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import fedstill
from fedstill.core import seeds


def held_out(name: str) -> fedstill.Dataset:
    """The dataset with a sixth of its training images, the same in every run, in place of its test images."""
    dataset = fedstill.load_dataset(name)
    order = torch.randperm(len(dataset.train.y), generator=seeds.torch_rng(0, "held out"))
    first, last = order[: len(order) // 6], order[len(order) // 6 :]
    train, test = (type(dataset.train)(dataset.train.x[part], dataset.train.y[part]) for part in (last, first))
    return replace(dataset, train=train, test=test)


def fashion_mini() -> fedstill.Dataset:
    return held_out("fashion-mini")


def fashion_mnist() -> fedstill.Dataset:
    return held_out("fashion-mnist")


def mnist() -> fedstill.Dataset:
    return held_out("mnist")


def svhn() -> fedstill.Dataset:
    return held_out("svhn")


def cifar10() -> fedstill.Dataset:
    return held_out("cifar10")
