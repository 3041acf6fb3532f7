"""Validation: a share that nobody trains on, measured beside the tests, to select and to stop by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import SettingError
from fedstill.core.tree import Tree
from fedstill.data.federation import Federation
from fedstill.data.validation import hold_out
from fedstill.inference.description import read_description
from support.runs import SMALL
from support.sites import Wire, alone, served, weights

TINY: dict[str, Any] = SMALL | {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 4}
HELD: dict[str, Any] = {"validation": 0.25}
AT_SITES: dict[str, Any] = {"model": "mlp", "model_options": {"hidden": [8]}, "rounds": 2} | HELD
VALIDATED = ("val_accuracy", "val_amp", "val_fm", "val_wlp")


def federation(**settings: Any) -> Federation:
    return prepare(resolve(TINY | settings)).federation


def test_a_share_of_every_client_and_of_the_server_is_held_out_and_nothing_is_lost() -> None:
    whole, held = federation(pool=0.1), federation(pool=0.1, **HELD)
    assert held.validation is not None
    for client in range(whole.clients):
        kept, out = held.train(client).tolist(), held.validation.of(client).tolist()
        assert sorted(kept + out) == sorted(whole.train(client).tolist())
        assert len(out) == min(np.rint(0.25 * whole.sizes[client]), max(whole.sizes[client] - 1, 0))
    assert sorted([*held.pool_index, *held.validation.pool_index]) == sorted(whole.pool_index)
    assert len(held.validation.pool_index) == round(0.25 * len(whole.pool_index))
    assert held.test_index.tolist() == whole.test_index.tolist()


def test_without_validation_nothing_changes() -> None:
    whole = federation()
    assert hold_out(whole, 0.0, 0) is whole
    assert whole.validation is None


def test_numbers_of_validation_are_those_of_the_model_on_the_samples_held_out() -> None:
    result = fedstill.run(**TINY | HELD | {"rounds": 1}, pool=0.1)
    setup = prepare(result.config)
    held, dataset = setup.federation.validation, setup.federation.dataset
    assert held is not None
    x, y = dataset.normalise(dataset.train.x[held.samples]), dataset.train.y[held.samples]
    with torch.no_grad():
        outputs = result.model(x)
    right = (outputs.argmax(1) == y).double()
    local = [right[a:b].mean() for a, b in zip(held.offsets, held.offsets[1:], strict=False) if a < b]
    record = result.records[-1]
    assert record["val_accuracy"] == pytest.approx(float(right.mean()))
    assert record["val_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)), rel=1e-5)
    assert record["val_amp"] == pytest.approx(float(right[: len(held.index)].mean()))
    assert record["val_wlp"] == pytest.approx(float(min(local)))
    assert record["val_fm"] == pytest.approx(float(np.var(local)))
    recalls = [right[y == c].mean() for c in range(10) if (y == c).any()]
    assert record["metrics"]["val_balanced_accuracy"] == pytest.approx(float(np.mean(recalls)))
    assert result.summary["final_val_amp"] == record["val_amp"]  # type: ignore[typeddict-item]


def test_methods_without_a_global_model_validate_the_clients_own() -> None:
    record = fedstill.run("feddistill", **TINY | HELD | {"rounds": 1, "participation": 1.0}).records[-1]
    assert 0 <= record["val_wlp"] <= record["val_amp"] <= 1


class Wandering(fedstill.Callback):
    """Interrupts a run once."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_round_start(self, run: fedstill.RunView, round_: int, clients: int) -> None:
        if round_ == self.at:
            raise KeyboardInterrupt


def test_selection_and_early_stopping_go_on_exactly_after_an_interruption(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"select": "val_amp", "patience": 2, "min_delta": 0.02, "restore_best": True, "rounds": 30}
    whole = fedstill.run(**TINY | HELD | chosen, out=tmp_path / "whole")
    stopped = whole.summary["rounds"]
    assert stopped < 30
    assert whole.summary["stopped_by"] == "EarlyStopping"
    values = [record["val_amp"] for record in whole.records]
    best = whole.summary["restored_round"]
    assert best == 1 + values.index(max(values))  # by however little
    assert stopped == _stops(values, patience=2, min_delta=0.02)
    chosen_by_hand = {"round": best, "by": "val_amp", "val_amp": max(values), "amp": whole.records[best - 1]["amp"]}
    assert chosen_by_hand.items() <= whole.summary["selected"].items()
    with pytest.raises(KeyboardInterrupt):
        fedstill.run(**TINY | HELD | chosen, out=tmp_path / "cut", callbacks=[Wandering(stopped)])
    resumed = fedstill.resume(tmp_path / "cut")
    assert resumed.summary["restored_round"] == best
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    kept = [(tmp_path / name / "best.safetensors") for name in ("cut", "whole")]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    assert read_description(kept[0]).round == best
    same = load_file(kept[0])
    assert all(same[name].equal(tensor) for name, tensor in whole.model.state_dict().items())


def _stops(values: list[float], patience: int, min_delta: float) -> int:
    """The round in which a run stops: the last improvement was by more than `min_delta` over the one before."""
    improved, waited = values[0], 0
    for round_, value in enumerate(values[1:], 2):
        improved, waited = (value, 0) if value > improved + min_delta else (improved, waited + 1)
        if waited == patience:
            return round_
    return len(values)


def test_small_gains_do_not_keep_a_run_going_and_are_still_the_best(tmp_path: Path) -> None:
    class Rising(fedstill.EarlyStopping):
        """Hears of a number that rises by 0.01 a round."""

        def on_round_end(self, run: fedstill.RunView, record: Any) -> bool:
            return super().on_round_end(run, {**record, "mine": 0.01 * record["round"]})  # type: ignore[typeddict-item]

    stop = Rising("mine", patience=2, min_delta=0.05, restore_best=True)
    summary = fedstill.run(**TINY, callbacks=[stop]).summary
    assert (summary["rounds"], summary["restored_round"]) == (3, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select": "val_amp"}, "nothing is held out"),
        ({"patience": 3}, "set select"),
        ({"restore_best": True}, "set select"),
        (HELD | {"select": "val_apm"}, "of validation there are val_accuracy"),
        ({"select": "apm"}, "the rounds have"),
        ({"validation": 1.0}, "validation"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fedstill.run(**TINY | settings)


@pytest.mark.slow
def test_sites_hold_out_what_the_clients_of_one_machine_do(tmp_path: Path) -> None:
    there = served(Wire(tmp_path), tmp_path / "served", **AT_SITES, pool=0.1, select="val_amp")
    here = alone(tmp_path / "alone", **AT_SITES, pool=0.1, select="val_amp")
    assert weights(tmp_path / "served") == weights(tmp_path / "alone")
    for ours, theirs in zip(here.records, there.records, strict=True):
        assert [theirs[name] for name in VALIDATED] == pytest.approx([ours[name] for name in VALIDATED])
        assert theirs["val_loss"] is None
        assert "never losses" in theirs["unmeasured"]["val_loss"]
    assert (tmp_path / "served/best.safetensors").read_bytes() == (tmp_path / "alone/best.safetensors").read_bytes()


class Boasting(Wire):
    """South claims more validation samples than the run's share."""

    def answer(self, name: str, request: Tree) -> Any:
        answer = super().answer(name, request)
        boast = name == "south" and isinstance(answer, dict) and "validation" in answer
        return answer | {"validation": [10**6]} if boast else answer


@pytest.mark.slow
def test_a_site_with_its_own_data_holds_out_its_own_share_and_no_other_claim_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(41, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 41)
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=x[:5], y_test=y[:5])
    wire = Boasting(tmp_path, north=str(tmp_path / "own.npz"))
    result = served(wire, tmp_path / "served", **AT_SITES)
    sizes = dict(line.split(",")[:2] for line in (tmp_path / "served/clients.csv").read_text().splitlines()[1:])
    assert int(sizes["north"]) == 41 - round(0.25 * 41)
    assert int(sizes["south"]) == 0  # refused
    assert result.records[-1]["val_amp"] is not None


def test_a_federation_of_ones_own_is_held_out_of_too() -> None:
    whole = federation()
    result = fedstill.run(data=replace(whole), model="mlp", rounds=1, epochs=1, engine="inline", validation=0.5)
    assert result.client_columns["train_samples"].sum() < whole.sizes.sum()
    assert result.records[-1]["val_accuracy"] is not None
