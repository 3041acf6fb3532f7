"""FedDistill and FedDistill+: whose logits are averaged, who learns from them, and who keeps what."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedstill.core.weights import FlatNet
from fedstill.models import Classifier
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from support.recorder import Round
from support.runs import SMALL, RunSmall, numbers, weights
from support.wiretap import (
    LR,
    assert_as_declared,
    assert_same_network,
    assert_same_tree,
    batch_ids,
    client_of,
    client_states,
    descend,
    global_test,
    held_by,
    kl_divergence,
    network,
    resumed_after_every_round,
    setup_of,
    softmax,
    taped,
    without,
)

BOTH = ["feddistill", "feddistill-plus"]


def class_logits(seed: int = 0) -> Tensor:
    return 3 * torch.randn(10, 10, generator=torch.Generator().manual_seed(seed))


def distilled(
    start: Tensor, client: int, round_: int, down: dict[str, Tensor], c: float
) -> tuple[Classifier, Tensor, Tensor]:
    """A client's round by a plain loop: its network, and its classes' mean logits (NaN where it has none)."""
    net, (x, y) = network(start), held_by(client)
    said: list[list[Tensor]] = [[] for _ in range(10)]
    for ids in batch_ids(client, round_):
        logits = net(x[ids])
        loss = F.cross_entropy(logits, y[ids])
        for label, row in zip(y[ids].tolist(), logits, strict=True):
            said[label].append(row.detach().double())
            if down["known"][label]:
                p, q = down["logits"][label].softmax(0), row.softmax(0)
                loss = loss + c * (p * (p.log() - q.log())).sum() / len(ids)
        descend(net, loss)
    means = [torch.stack(rows).mean(0) if rows else torch.full((10,), torch.nan).double() for rows in said]
    return net, torch.stack(means), torch.tensor([len(rows) for rows in said])


@pytest.mark.parametrize("method", BOTH)
def test_the_loss_is_c_times_kl_from_the_logits_of_the_samples_class(method: str) -> None:
    c = 0.6
    setup = setup_of(method, c=c)
    known = torch.ones(10)
    known[[2, 7]] = 0
    down = {"model": setup.task.initial, "logits": class_logits(), "known": known}
    objective = setup.method.objective(client_of(setup, 0, 2, down))
    y = torch.tensor([1, 2, 1, 9, 7, 0])
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert objective.term is not None
    loss = objective.term(Batch(torch.zeros(6, 1, 16, 16), y, torch.arange(6)), Outputs(logits, torch.zeros(6, 84)))
    loss.backward()

    teacher, student = down["logits"].double().numpy()[y], logits.detach().double().numpy()
    heard = known.numpy()[y]
    assert loss.item() == pytest.approx(c * (kl_divergence(teacher, student) * heard).sum() / 6, rel=1e-5)
    slope = c * heard[:, None] * (softmax(student) - softmax(teacher)) / 6
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), slope, rtol=1e-4, atol=1e-7)
    assert not logits.grad[[1, 4]].any(), "a class never heard of teaches nothing"


def test_a_clients_round_equals_a_plain_loop() -> None:
    _, tape = taped("feddistill-plus", c=2.0, lr=LR)
    assert not tape[0].down["known"].any()
    for crossed in tape:
        for k, up in crossed.up.items():
            net, means, counts = distilled(crossed.down["model"], k, crossed.number, crossed.down, 2.0)
            assert_same_network(up["model"], net)
            assert torch.equal(up["known"], (counts > 0).float())
            torch.testing.assert_close(
                up["logits"][counts > 0].double(), means[counts > 0], rtol=1e-4, atol=1e-5
            )  # over every local step


def test_the_mean_is_over_all_local_epochs() -> None:
    _, tape = taped("feddistill-plus", epochs=3, rounds=1, lr=1e-12)  # a network that does not move
    for k, up in tape[0].up.items():
        x, y = held_by(k)
        logits = network(tape[0].down["model"])(x).detach()
        for label in range(10):
            if (y == label).any():
                torch.testing.assert_close(up["logits"][label], logits[y == label].mean(0), rtol=1e-4, atol=1e-5)


def expected_knowledge(tape: list[Round]) -> tuple[Tensor, Tensor]:
    """Each class's plain mean over the last round's participants that have it, else what was known before."""
    logits, known = torch.zeros(10, 10, dtype=torch.float64), torch.zeros(10)
    for crossed in tape:
        for label in range(10):
            rows = [up["logits"][label].double() for up in crossed.up.values() if up["known"][label]]
            if rows:
                logits[label], known[label] = torch.stack(rows).mean(0), 1
    return logits, known


@pytest.mark.parametrize("method", BOTH)
def test_the_server_takes_the_plain_mean_over_participants_that_have_the_class(method: str) -> None:
    _, tape = taped(method, rounds=6, participation=0.34, alpha=0.05)
    kept = 0
    for t in range(1, len(tape)):
        logits, known = expected_knowledge(tape[:t])
        assert torch.equal(tape[t].down["known"], known)
        torch.testing.assert_close(tape[t].down["logits"].double(), logits, rtol=1e-6, atol=1e-7)
        had = torch.stack([up["known"] for up in tape[t - 1].up.values()]).amax(0)
        kept += int((known > had).sum())
    assert kept, "some class must have been missing from a round for this test to say anything"
    assert not tape[1].down["known"].all(), "some class must be unknown at first"


def test_feddistill_plus_with_c_zero_is_fedavg(run_small: RunSmall) -> None:
    plain, zero = run_small("fedavg"), run_small("feddistill-plus", c=0.0)
    assert torch.equal(weights(zero), weights(plain))
    names = ("bytes_down", "bytes_up")
    assert without(numbers(zero), *names) == without(numbers(plain), *names)
    assert not torch.equal(weights(run_small("feddistill-plus", c=1.0)), weights(plain))


def test_feddistill_plus_averages_weights_by_samples() -> None:
    _, tape = taped("feddistill-plus")
    for crossed, following in pairwise(tape):
        n = sum(crossed.samples.values())
        mean = sum((crossed.samples[k] / n * up["model"].double() for k, up in crossed.up.items()), torch.zeros(()))
        torch.testing.assert_close(following.down["model"].double(), mean, rtol=1e-6, atol=1e-8)


# --- FedDistill: no weights cross -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("c", [0.0, 2.0])
def test_a_client_goes_on_from_its_own_last_model(tmp_path: Path, c: float) -> None:
    _, tape = taped("feddistill", c=c, rounds=4, out=tmp_path / "run")
    _, plain = taped("fedavg", rounds=1)
    w0 = plain[0].down["model"]
    models: dict[int, Classifier] = {}
    for crossed in tape:
        for k, up in crossed.up.items():
            start = w0 if k not in models else _vector(models[k])
            models[k], means, counts = distilled(start, k, crossed.number, crossed.down, c)
            torch.testing.assert_close(up["logits"][counts > 0].double(), means[counts > 0], rtol=1e-3, atol=1e-4)
    assert any(sum(k in crossed.up for crossed in tape) > 1 for k in models), "some client must have come back"
    states = client_states(tmp_path / "run")
    assert set(states) == set(models)
    for k, net in models.items():
        assert_same_network(states[k]["model"], net, atol=1e-5)


def _vector(net: Classifier) -> Tensor:
    """A network as a weight vector."""
    empty = FlatNet(network(torch.zeros(sum(p.numel() for p in net.parameters()))))
    empty.module.load_state_dict(net.state_dict())
    return empty.read()


@pytest.mark.parametrize("method", BOTH)
def test_what_crosses_is_what_is_declared(method: str) -> None:
    _, tape = taped(method)
    assert_as_declared(method, tape)
    logits = {"logits", "known"}
    names = logits if method == "feddistill" else logits | {"model"}
    for crossed in tape:
        assert set(crossed.down) == names
        assert all(set(up) == names for up in crossed.up.values())
        assert crossed.down["logits"].shape == (10, 10)
    if method == "feddistill":
        numbers_sent = sum(t.numel() for t in tape[0].down.values())
        assert numbers_sent == 10 * 10 + 10, "not a single weight"


def test_feddistill_reports_the_active_clients_own_models(tmp_path: Path) -> None:
    result, tape = taped("feddistill", rounds=2, out=tmp_path / "run")
    x, y = global_test()
    states = client_states(tmp_path / "run")
    accuracies, losses = [], []
    for k in tape[-1].up:
        logits = network(states[k]["model"])(x).detach()
        accuracies.append(float((logits.argmax(1) == y).double().mean()))
        losses.append(float(F.cross_entropy(logits.double(), y)))
    assert result.records[-1]["accuracy"] == pytest.approx(np.mean(accuracies), abs=0.002)
    assert result.records[-1]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_feddistill_takes_every_policy_for_batchnorm(run_small: RunSmall, buffers: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    result = run_small("feddistill", model=model, buffers=buffers, rounds=2)
    assert len(result.records) == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", BOTH)
def test_resumed_after_every_round_gives_the_same_bits(run_small: RunSmall, tmp_path: Path, method: str) -> None:
    settings: dict[str, Any] = {"rounds": 4, "lr": LR}
    whole = run_small(method, out=tmp_path / "whole", **settings)
    broken = resumed_after_every_round(method, tmp_path / "broken", **settings)
    assert numbers(broken) == numbers(whole)
    assert torch.equal(weights(broken), weights(whole))
    assert_same_tree(client_states(tmp_path / "broken"), client_states(tmp_path / "whole"))


@pytest.mark.slow
def test_same_bits_in_worker_processes(run_small: RunSmall, tmp_path: Path) -> None:
    inline = run_small("feddistill", out=tmp_path / "inline")
    process = run_small("feddistill", out=tmp_path / "process", engine="process", workers=2)
    assert numbers(inline) == numbers(process)
    states = client_states(tmp_path / "inline")
    assert len(states) > SMALL["clients"] // 2
    assert_same_tree(states, client_states(tmp_path / "process"))
