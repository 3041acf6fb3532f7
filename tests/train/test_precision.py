"""Mixed precision: passes through the network in bfloat16, everything else in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.train.evaluate import logits, outputs
from fedstill.train.task import classifier
from support.commandline import change_settings
from support.runs import RunSmall, weights


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some virtual machines announce AMX and lack it: oneDNN's kernels for bfloat16 would end the process there."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def settings(**changed: Any) -> dict[str, Any]:
    return {"model": "cnn", "image_size": 16, "clients": 4, "fraction": 0.1, "precision": "bfloat16"} | changed


def test_a_pass_is_in_bfloat16_and_what_comes_of_it_in_float32() -> None:
    task = prepare(resolve(settings())).task
    net = classifier(task.nets.get("student"))
    seen: list[torch.dtype] = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    x = task.dataset.normalise(task.dataset.train.x[:4])
    out = outputs(net, x)
    assert seen == [torch.bfloat16] * len(seen) != []
    assert (out.logits.dtype, out.features.dtype, logits(net, x).dtype) == (torch.float32,) * 3
    out.logits.sum().backward()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}
    assert task.dtype == torch.float32


def test_a_network_in_float64_is_left_alone() -> None:
    double = nn.Sequential(nn.Flatten(), nn.Linear(256, 10)).double()
    x = torch.ones(2, 1, 16, 16, dtype=torch.float64)
    net = fedstill.models.as_classifier(double)
    expected = net(x)
    net.precision = torch.bfloat16
    assert torch.equal(outputs(net, x).logits, expected)


@pytest.mark.slow
def test_learning_in_bfloat16_is_nearly_as_good(run_small: RunSmall) -> None:
    changed = {"clients": 2, "fraction": 0.2, "rounds": 5, "participation": 1.0, "alpha": 10.0, "lr": 0.1}
    changed |= {"eval_every": 0, "epochs": 2}
    full, lower = (run_small("fedgkd", **changed, precision=name) for name in ("float32", "bfloat16"))
    assert not torch.equal(weights(full), weights(lower))
    assert {t.dtype for t in lower.model.state_dict().values()} == {torch.float32}
    assert full.records[-1]["accuracy"] > 0.5
    assert lower.records[-1]["accuracy"] > full.records[-1]["accuracy"] - 0.05


def test_a_run_cannot_go_on_in_another_precision(run_small: RunSmall, tmp_path: Any) -> None:
    run_small(rounds=1, out=tmp_path / "run")
    change_settings(tmp_path / "run", 'precision = "float32"', 'precision = "bfloat16"')
    with pytest.raises(fedstill.SettingError, match="precision was 'float32'"):
        fedstill.resume(tmp_path / "run", rounds=2)
