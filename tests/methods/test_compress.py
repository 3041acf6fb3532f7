"""Messages in fewer bytes: what is sent, what is lost and comes back, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.flower.records import from_records, to_records
from fedstill.methods import registry
from fedstill.methods.base import Uplink, fault
from fedstill.methods.compress import BLOCK, Compress, packed, unpacked
from fedstill.methods.fedavg import FedAvg
from support.runs import SMALL, RunSmall, numbers, weights
from support.sites import SETTINGS, Wire, alone, served
from support.wiretap import setup_of

VECTOR = torch.randn(3 * BLOCK + 100, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 868)


def test_8_bits_are_steps_of_each_blocks_largest() -> None:
    sent = packed(VECTOR, "int8", 1)
    found = unpacked(sent, len(VECTOR), torch.float32).numpy()
    for start in range(0, len(VECTOR), BLOCK):
        block = VECTOR.numpy()[start : start + BLOCK].astype(np.float64)
        step = np.abs(block).max() / 127
        np.testing.assert_allclose(found[start : start + BLOCK], np.rint(block / step) * step, rtol=1e-5, atol=0)
        assert np.abs(found[start : start + BLOCK] - block).max() <= step / 2 * 1.0001
    assert sent["int8"].numel() == len(VECTOR)
    assert sent["scale"].numel() == 4
    assert not unpacked(packed(torch.zeros(5), "int8", 1), 5, torch.float32).any()


def test_top_k_are_the_largest_changes_of_equal_ones_the_first() -> None:
    sent = packed(VECTOR, "topk", 0.01)
    by_size = sorted(range(len(VECTOR)), key=lambda i: (-abs(float(VECTOR[i])), i))
    assert sent["indices"].tolist() == sorted(by_size[:9])
    found = unpacked(sent, len(VECTOR), torch.float32)
    assert torch.equal(found[sent["indices"].long()], VECTOR[sent["indices"].long()])
    assert int((found != 0).sum()) == 9
    assert packed(torch.ones(10), "topk", 0.3)["indices"].tolist() == [0, 1, 2]


def test_bfloat16_is_float32_rounded_to_its_upper_half() -> None:
    bits = VECTOR.numpy().view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).view(np.float32)
    np.testing.assert_array_equal(unpacked(packed(VECTOR, "bfloat16", 1), len(VECTOR), torch.float32).numpy(), rounded)


@pytest.mark.parametrize("scheme", ["int8", "topk"])
def test_error_feedback_keeps_the_sum_of_all_updates(scheme: Any) -> None:
    size, stream = 1000, torch.Generator().manual_seed(2)
    start = torch.zeros(size, dtype=torch.float64)
    task = SimpleNamespace(size=size, trainable=size)
    client: Any = SimpleNamespace(task=task, state={}, down={"model": start})
    wanted, received = start.clone(), start.clone()
    for _ in range(20):
        update = torch.randn(size, generator=stream, dtype=torch.float64)
        client.weights = start + update
        message = Compress(up=scheme, share=0.02).uplink(client)
        wanted += update
        sent = {name.removeprefix("update."): part for name, part in message.items()}
        received += unpacked(sent, size, torch.float64)
    assert not torch.allclose(received, wanted)
    torch.testing.assert_close(received + client.state["residual"], wanted, rtol=0, atol=1e-11)


def test_with_nothing_compressed_it_is_the_method_itself(run_small: RunSmall) -> None:
    plain = run_small(FedAvg(), rounds=2)
    same = run_small(Compress(up="none", down="none"), rounds=2)
    assert torch.equal(weights(plain), weights(same))
    assert [r["bytes_up"] for r in plain.records] == [r["bytes_up"] for r in same.records]


def test_bytes_are_counted_as_sent(run_small: RunSmall) -> None:
    record = run_small(Compress(up="topk", down="int8", share=0.01), rounds=1).records[0]
    size, clients = setup_of("fedavg", **SMALL).task.size, record["clients"]
    assert record["bytes_up"] == clients * -(-size // 100) * 8
    assert record["bytes_down"] == clients * (size + -(-size // BLOCK) * 4)


@pytest.mark.slow
def test_a_federation_of_sites_and_a_simulation_have_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 2, "up": "topk", "down": "int8", "share": 0.1}

    class Recording(Wire):
        def answer(self, name: str, request: Any) -> Any:
            answer = super().answer(name, request)
            self.sites[name].record(request, {"body": answer})
            return answer

    remote = served(Recording(tmp_path / "sites"), tmp_path / "served", "fedavg+compress", **settings)
    here = alone(tmp_path / "alone", "fedavg+compress", **settings)
    assert torch.equal(weights(remote), weights(here))
    assert [r["bytes_up"] for r in remote.records] == [r["bytes_up"] for r in here.records]
    trained = json.loads((tmp_path / "sites/north/audit.jsonl").read_text().splitlines()[1])
    assert {part["name"]: (part["kind"], part["dtype"]) for part in trained["parts"]} == {
        "update.indices": ("weights", "int32"),
        "update.values": ("weights", "float32"),
    }


@pytest.mark.slow
def test_a_run_that_is_resumed_has_kept_what_was_not_sent(tmp_path: Path) -> None:
    class Kill(fedstill.Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    settings: dict[str, Any] = SETTINGS | {"rounds": 4, "engine": "inline", "up": "topk", "share": 0.02}
    whole = fedstill.run("fedavg+compress", **settings, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedstill.run("fedavg+compress", **settings, out=tmp_path / "killed", callbacks=[Kill()])
    resumed = fedstill.resume(tmp_path / "killed")
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("scheme", ["bfloat16", "int8"])
def test_batchnorms_statistics_are_sent_as_they_are(scheme: Any) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 10))

    task = prepare(resolve(SMALL | {"method": "fedavg"}), model=network).task
    method = Compress(down=scheme, up=scheme)
    model = torch.randn(task.size, generator=torch.Generator().manual_seed(3))
    server: Any = SimpleNamespace(task=task, model=model)
    client: Any = SimpleNamespace(task=task, state={}, down=method.downlink(server), receive=lambda: None)
    method.receive(client)
    assert task.trainable < task.size
    assert torch.equal(client.down["model"][task.trainable :], model[task.trainable :])
    client.weights = client.down["model"] + 1
    sent = method.uplink(client)
    assert fault(sent, method.wire(task).up) is None
    seen: list[Any] = []

    class Sees(FedAvg):
        def aggregate(self, server: Any, uplinks: Any) -> None:
            seen.extend(uplinks)

    Compress(up=scheme, inner=Sees()).aggregate(server, iter([Uplink(0, 1, sent)]))
    assert torch.equal(seen[0]["model"][task.trainable :], client.weights[task.trainable :])
    torch.testing.assert_close(seen[0]["model"][: task.trainable], model[: task.trainable] + 1, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("name", "hyper", "problem"),
    [
        ("feddistill+compress", {}, "feddistill does not send them"),
        ("fedavg+compress+t1", {}, "put t1 before it"),
        ("fedavg+compress+median", {}, "put median before it"),
        ("fedavg+compress", {"down": "topk"}, "down"),
    ],
)
def test_what_cannot_bear_it_is_refused(name: str, hyper: dict[str, Any], problem: str) -> None:
    with pytest.raises(fedstill.SettingError, match=problem):
        registry.make(name, hyper).check(setup_of("fedavg", **SMALL).task)


def test_a_site_that_sends_impossible_parts_is_dropped() -> None:
    declared = Compress(up="topk").wire(setup_of("fedavg", **SMALL).task).up
    kept, size = declared["update.indices"].shape[0], int(declared["update.indices"].most or 0) + 1
    good = {"update.indices": torch.arange(kept, dtype=torch.int32), "update.values": torch.ones(kept)}
    assert fault(good, declared) is None
    assert "above" in str(fault(good | {"update.indices": torch.full((kept,), size, dtype=torch.int32)}, declared))
    assert "above" in str(fault(good | {"update.values": torch.full((kept,), 1e38)}, declared))


def test_bfloat16_travels_in_flowers_records() -> None:
    sent = torch.randn(5).bfloat16()
    found = from_records(to_records({"a": sent, "b": [torch.ones(2)]}))
    assert found["a"].dtype == torch.bfloat16
    assert torch.equal(found["a"], sent)
