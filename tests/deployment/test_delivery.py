"""The end of a served run: what sites get, what they refuse, and what they tell their owners."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.core.errors import SettingError
from fedstill.core.reports import Refusal
from fedstill.core.tree import Tree
from fedstill.deployment.delivery import FINISH
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.site import Site
from support.sites import NAMES, POLICY, Wire, served

pytestmark = pytest.mark.slow  # tests/deployment/test_sites.py delivers too, and quickly


class Listening(Wire):
    """Sites that note what they would print."""

    def __init__(self, folder: Path, **data: str) -> None:
        super().__init__(folder, **data)
        self.printed: dict[str, list[str]] = {name: [] for name in NAMES}
        self.sites = {
            name: Site(folder / name, LocalInputs(data=data.get(name, "")), POLICY, None, self.printed[name].append)
            for name in NAMES
        }


def hospitals(folder: Path) -> dict[str, str]:
    """Data of each site's own, with tests."""
    dataset = fedstill.load_dataset("fashion-mini", image_size=16)
    for k, name in enumerate(NAMES):
        part, test = slice(200 * k, 200 * k + 200), slice(40 * k, 40 * k + 40)
        np.savez(
            folder / f"{name}.npz",
            x=dataset.train.x[part, 0].numpy(),
            y=dataset.train.y[part].numpy(),
            x_test=dataset.test.x[test, 0].numpy(),
            y_test=dataset.test.y[test].numpy(),
            classes=np.array(dataset.classes),
        )
    return {name: str(folder / f"{name}.npz") for name in NAMES}


def test_every_site_can_predict_with_the_final_model(tmp_path: Path) -> None:
    wire = Listening(tmp_path, **hospitals(tmp_path))
    served(wire, tmp_path / "run", rounds=2)
    x = fedstill.load_dataset("fashion-mini").test.x.numpy()
    expected = fedstill.load(tmp_path / "run").predict_proba(x)
    for name in NAMES:
        np.testing.assert_allclose(fedstill.load(tmp_path / name).predict_proba(x), expected, atol=1e-6)
        for file in ("model.safetensors", "model.json"):
            assert stat.S_IMODE((tmp_path / name / file).stat().st_mode) == 0o600


def test_a_site_says_how_the_model_does_on_its_own_tests(tmp_path: Path) -> None:
    data = hospitals(tmp_path)
    wire = Listening(tmp_path, **data)
    served(wire, tmp_path / "run", rounds=2)
    for name in NAMES:
        arrays = np.load(data[name])
        labels = arrays["classes"][arrays["y_test"]]
        right = (fedstill.load(tmp_path / name).predict(arrays["x_test"]) == labels).mean()
        (line,) = wire.printed[name]
        assert line.startswith(f"finished: the model is in {tmp_path / name}")
        assert f"right on {100 * right:.1f} % of your 40 tests" in line


def test_where_there_is_no_global_model_a_site_keeps_its_own(tmp_path: Path) -> None:
    served(Listening(tmp_path), tmp_path / "run", "feddistill", rounds=1)
    state = fedstill.load_dataset("fashion-mini").test.x.numpy()[:50]
    found = [fedstill.load(tmp_path / name).predict_proba(state) for name in NAMES]
    assert not np.allclose(found[0], found[1])
    assert "own" in repr(fedstill.load(tmp_path / "north"))
    with pytest.raises(SettingError, match="has no global model, every client keeps its own"):
        fedstill.load(tmp_path / "run")


class Tampering(Listening):
    """A server whose last message is another than it should be."""

    def __init__(self, folder: Path, change: Any) -> None:
        super().__init__(folder)
        self.change = change
        self.refusals: list[str] = []

    def answer(self, name: str, request: Tree) -> Any:
        if isinstance(request["request"], dict) and request["request"]["kind"] == FINISH:
            request["down"] = self.change(request["down"])
        try:
            return super().answer(name, request)
        except Refusal as error:
            self.refusals.append(str(error))
            return {"error": {"code": error.code.value, "step": "final", "number": "0000"}}


@pytest.mark.parametrize(
    "change",
    [
        lambda down: {"model": down["model"][:-1]},
        lambda down: {"model": torch.full_like(down["model"], torch.nan)},
        lambda down: {"model": down["model"].double()},
        lambda down: down | {"more": torch.zeros(1)},
        lambda down: {},
    ],
)
def test_a_site_writes_no_model_that_is_not_of_its_task(tmp_path: Path, change: Any) -> None:
    wire = Tampering(tmp_path, change)
    result = served(wire, tmp_path / "run", rounds=1)
    assert result.summary["rounds"] == 1
    assert len(wire.refusals) == len(NAMES)
    assert [path.parent.name for path in tmp_path.glob("*/model.*")] == ["run", "run"]
    assert "north has not got the final model" in (tmp_path / "run" / "log.txt").read_text()


def test_a_network_that_fails_at_the_end_does_not_fail_the_run(tmp_path: Path) -> None:
    class Cut(Listening):
        def send_requests(self, requests: Mapping[str, Tree], **more: Any) -> Iterator[tuple[str, Any]]:
            if any(isinstance(r["request"], dict) and r["request"]["kind"] == FINISH for r in requests.values()):
                raise RuntimeError("the cable is out")
            return super().send_requests(requests, **more)

    assert served(Cut(tmp_path), tmp_path / "run", rounds=1).summary["rounds"] == 1
    assert "the cable is out" in (tmp_path / "run" / "log.txt").read_text()


def test_a_site_that_is_away_at_the_end_gets_the_model_when_the_server_is_started_again(tmp_path: Path) -> None:
    wire = Listening(tmp_path)
    served(wire, tmp_path / "run", rounds=1)
    for file in ("model.json", "model.safetensors"):
        (tmp_path / "south" / file).unlink()
    served(wire, tmp_path / "run", rounds=1)
    assert fedstill.load(tmp_path / "south").classes == fedstill.load(tmp_path / "run").classes
