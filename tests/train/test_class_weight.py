"""Class weights: rare classes count for more in the clients' cross-entropy, and nothing changes without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import SettingError
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch, batches, cross_entropy
from fedstill.train.task import LocalTraining, Samples
from support.runs import SMALL, weights

TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}}


def test_a_sample_that_counts_three_times_is_as_good_as_three() -> None:
    logits, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])
    counted = cross_entropy(
        Batch(torch.zeros(4), y, torch.arange(4), torch.tensor([1.0, 3.0, 1.0, 3.0])), Outputs(logits, logits)
    )
    repeated = torch.tensor([0, 1, 1, 1, 2, 3, 3, 3])
    assert 4 * counted.item() == pytest.approx(F.cross_entropy(logits[repeated], y[repeated], reduction="sum").item())


def test_each_sample_of_a_batch_has_the_weight_of_its_class() -> None:
    y = torch.tensor([0, 2, 1, 2, 0])
    data = Samples(torch.zeros(5, 1), y, torch.arange(5), lambda x: x)
    found = batches(data, LocalTraining(epochs=1, batch_size=2, class_weight=(1.0, 2.0, 4.0)), torch.Generator())
    for batch in found:
        assert batch.weight is not None
        assert batch.weight.tolist() == [(1.0, 2.0, 4.0)[label] for label in batch.y.tolist()]
    plain = batches(data, LocalTraining(epochs=1, batch_size=2), torch.Generator())
    assert all(batch.weight is None for batch in plain)


def test_balanced_weights_are_scikit_learns_for_all_clients_samples_together() -> None:
    setup = prepare(resolve(SMALL | {"imbalance_factor": 10.0, "class_weight": "balanced"}))
    federation = setup.federation
    labels = federation.dataset.train.y.numpy()[federation.train_index]
    expected = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    assert setup.task.local.class_weight == pytest.approx(expected)
    assert np.mean([setup.task.local.class_weight[label] for label in labels]) == pytest.approx(1)


@pytest.mark.slow
def test_weights_twice_as_large_are_a_rate_twice_as_large() -> None:
    names = fedstill.load_dataset("fashion-mini").classes
    twice = fedstill.run("fedavg", **TINY, lr=0.02, class_weight=dict.fromkeys(names, 2.0))
    faster = fedstill.run("fedavg", **TINY, lr=0.04)
    torch.testing.assert_close(weights(twice), weights(faster), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_balanced_training_has_the_same_bits_on_every_engine_and_with_its_weights_written_out() -> None:
    settings = TINY | {"imbalance_factor": 20.0, "class_weight": "balanced"}
    task = prepare(resolve(settings)).task
    written = {"class_weight": dict(zip(task.dataset.classes, task.local.class_weight, strict=True))}
    expected = weights(fedstill.run("fedavg", **settings))
    for other in ({"engine": "process", "workers": 2}, written):
        assert torch.equal(weights(fedstill.run("fedavg", **settings | other)), expected)
    assert not torch.equal(weights(fedstill.run("fedavg", **settings | {"class_weight": ""})), expected)


def test_every_region_weighs_classes_as_the_whole_federation_does() -> None:
    setup = prepare(resolve(SMALL | {"class_weight": "balanced", "region": [{"lr": 0.01}, {}]}))
    assert {region.task.local.class_weight for region in setup.hierarchy.regions} == {setup.task.local.class_weight}


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("balance", "should be 'balanced', or a table with a number above 0 for each class"),
        ({"Bag": 0.0}, "should be 'balanced', or a table"),
        ({"Bag": 2.0}, "class_weight: a number for 'T-shirt/top' is missing; each class needs one"),
        ("more", "unknown class in class_weight 'Hat'"),
    ],
)
def test_weights_that_do_not_fit_the_classes_are_refused(weight: Any, message: str) -> None:
    if weight == "more":
        weight = dict.fromkeys([*fedstill.load_dataset("fashion-mini").classes, "Hat"], 1.0)
    with pytest.raises(SettingError, match=message):
        fedstill.run("fedavg", **TINY, class_weight=weight)
