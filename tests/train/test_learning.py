"""The local loop, FedAvg and FedProx against the same thing written out by hand."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import fedstill
import fedstill.models
import fedstill.train.client as client_module
from fedstill.core import seeds, tree
from fedstill.core.choices import BufferPolicy
from fedstill.core.weights import FlatNet
from fedstill.data.federation import from_clients
from fedstill.methods.fedprox import FedProx
from fedstill.train.evaluate import EVAL_BATCH, predict
from fedstill.train.loop import Objective, batches, fit
from fedstill.train.optimizers import SGD, Adam
from fedstill.train.task import LocalTraining, Samples
from support.runs import RunSmall, numbers, weights


def samples(n: int, d: int = 4, classes: int = 3, seed: int = 0) -> Samples:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, d, generator=g), torch.randint(0, classes, (n,), generator=g)
    return Samples(x, y, torch.arange(n), lambda t: t)


def linear_net(d: int = 4, classes: int = 3) -> FlatNet:
    torch.manual_seed(1)
    return FlatNet(fedstill.models.as_classifier(nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, classes))))


def test_fedprox_with_mu_zero_is_fedavg(run_small: RunSmall) -> None:
    plain, prox = run_small("fedavg"), run_small("fedprox", mu=0.0)
    assert torch.equal(weights(plain), weights(prox))
    assert numbers(plain) == numbers(prox)


def test_fedprox_with_mu_differs_from_fedavg(run_small: RunSmall) -> None:
    assert not torch.equal(weights(run_small("fedavg")), weights(run_small("fedprox", mu=1.0)))


def test_the_proximal_gradient_is_that_of_the_written_loss() -> None:
    net, data, mu = linear_net(), samples(10), 0.7
    w_t = net.read() + 0.1
    reference = copy.deepcopy(net.module)
    local = LocalTraining(epochs=1, batch_size=10, lr=0.5)
    objective = Objective(gradient=lambda w: mu * (w - w_t[: net.trainable]))
    fit(net, data, objective, local, lr=0.5, order=torch.Generator().manual_seed(0))

    x, y = data.x(torch.arange(10)), data.y
    anchors = [e.view(w_t) for e in net.entries]
    loss = F.cross_entropy(reference(x), y)
    loss = loss + mu / 2 * sum(((p - a) ** 2).sum() for p, a in zip(reference.parameters(), anchors, strict=True))
    loss.backward()
    for trained, p in zip(net.params, reference.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(trained, p - 0.5 * p.grad)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_local_loop_equals_plain_pytorch(optimizer: Literal["sgd", "adam"]) -> None:
    net, data = linear_net(), samples(23)
    reference = copy.deepcopy(net.module)
    local = LocalTraining(
        epochs=3, batch_size=5, optimizer=optimizer, lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5
    )
    done = fit(net, data, Objective(), local, lr=0.1, order=torch.Generator().manual_seed(7))

    if optimizer == "sgd":
        opt: torch.optim.Optimizer = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    else:
        opt = torch.optim.Adam(reference.parameters(), 0.1, weight_decay=0.01)
    order, steps = torch.Generator().manual_seed(7), 0
    for _ in range(3):
        permutation = torch.randperm(23, generator=order)
        for start in range(0, 23, 5):
            ids = permutation[start : start + 5]
            opt.zero_grad()
            F.cross_entropy(reference(data.x(ids)), data.y[ids]).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            opt.step()
            steps += 1
    assert done.steps == steps == 15
    for a, b in zip(net.params, reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weight_decay_that_leaves_out_norms_equals_pytorchs_parameter_groups(optimizer: Literal["sgd", "adam"]) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU())
    net, data = FlatNet(fedstill.models.Stacked(body, nn.Linear(6, 3), feature_dim=6)), samples(23)
    reference = copy.deepcopy(net.module)
    local = LocalTraining(epochs=2, batch_size=23, optimizer=optimizer, weight_decay=0.5, decay_norms=False, clip=0.5)
    fit(net, data, Objective(), local, lr=0.1, order=torch.Generator().manual_seed(7))

    norm = [p for n, p in reference.named_parameters() if n.startswith("body.2")]
    others = [p for n, p in reference.named_parameters() if not n.startswith("body.2")]
    groups = [{"params": norm, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}]
    opt = torch.optim.SGD(groups, 0.1) if optimizer == "sgd" else torch.optim.Adam(groups, 0.1)
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(reference(data.x(torch.arange(23))), data.y).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        opt.step()
    for a, b in zip(net.params, reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_one_fedavg_round_equals_a_plain_pytorch_loop() -> None:
    settings: dict[str, Any] = {"clients": 5, "participation": 0.4, "epochs": 2, "batch_size": 16, "lr": 0.1, "seed": 3}
    dataset = fedstill.load_dataset("fashion-mini", image_size=32)
    result = fedstill.run("fedavg", data=dataset, rounds=1, fraction=0.1, alpha=0.5, engine="inline", **settings)
    federation = fedstill.federate(dataset, clients=5, seed=3, alpha=0.5, fraction=0.1)

    torch.manual_seed(seeds.key(3, "initial weights"))
    start = fedstill.models.build("lenet5", (1, 32, 32), 10)
    cohort = seeds.numpy_rng(3, "cohort", 1).choice(5, 2, replace=False)
    mean = np.array(dataset.mean, np.float32)
    std = np.array(dataset.std, np.float32)
    total: dict[str, torch.Tensor] = {}
    for k in cohort:
        index = federation.train(int(k))
        x = torch.from_numpy((dataset.train.x.numpy()[index] / np.float32(255) - mean) / std)
        y = dataset.train.y[index]
        net = copy.deepcopy(start)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        order = seeds.torch_rng(3, "batches", 1, int(k))
        for _ in range(2):
            for ids in torch.randperm(len(y), generator=order).split(16):
                opt.zero_grad()
                F.cross_entropy(net(x[ids]), y[ids]).backward()
                opt.step()
        for name, p in net.state_dict().items():
            total[name] = total.get(name, 0) + len(y) * p.double()
    n = sum(len(federation.train(int(k))) for k in cohort)
    trained = result.model.state_dict()
    for name, p in total.items():
        torch.testing.assert_close(trained[name], (p / n).float(), rtol=1e-4, atol=1e-5)


def test_equal_data_and_one_full_batch_step_is_centralised_sgd() -> None:
    data = samples(40, d=6)
    x, y = data.x(torch.arange(40)), data.y
    shares = [(x[i * 10 : (i + 1) * 10], y[i * 10 : (i + 1) * 10]) for i in range(4)]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    federation = from_clients(shares, test=(x, y), test_fraction=0)
    result = fedstill.run(
        data=federation, model=model, rounds=4, epochs=1, batch_size=10, participation=1.0, lr=0.3, engine="inline"
    )
    central = copy.deepcopy(model)
    opt = torch.optim.SGD(central.parameters(), lr=0.3)
    for _ in range(4):
        opt.zero_grad()
        F.cross_entropy(central(x), y).backward()
        opt.step()
    for a, b in zip(result.model.parameters(), central.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_epoch_visits_each_sample_once_and_keeps_the_partial_batch() -> None:
    data, local = samples(23), LocalTraining(epochs=2, batch_size=5)
    drawn = list(batches(data, local, torch.Generator().manual_seed(0)))
    assert [len(b.y) for b in drawn] == [5, 5, 5, 5, 3] * 2
    for epoch in (drawn[:5], drawn[5:]):
        assert sorted(torch.cat([b.ids for b in epoch]).tolist()) == list(range(23))


def test_equal_steps_give_every_client_the_same_number_of_full_batches() -> None:
    local = LocalTraining(epochs=3, batch_size=5, steps_per_epoch=4)
    for n in (23, 100, 5):
        drawn = list(batches(samples(n), local, torch.Generator().manual_seed(0)))
        assert [len(b.y) for b in drawn] == [5] * 12
    only = list(batches(samples(3), local, torch.Generator().manual_seed(0)))
    assert [len(b.y) for b in only] == [3] * 12, "a client's only partial batch is never dropped"


def test_batchnorm_never_meets_a_batch_of_one(run_small: RunSmall) -> None:
    drawn = batches(samples(11), LocalTraining(epochs=1, batch_size=5), torch.Generator(), no_single=True)
    assert [len(b.y) for b in drawn] == [5, 6]


def test_the_teacher_sees_each_sample_once_a_round(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Taught(fedstill.FedAvg):
        def objective(self, client: fedstill.Client) -> Objective:
            predict = client.teacher(client.down["model"])
            return Objective(term=lambda batch, out: 0.1 * fedstill.kl(predict(batch).logits, out.logits))

    original = predict

    def counting(task: object, vector: object, data: Samples) -> object:
        seen.append(len(data))
        return original(task, vector, data)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "predict", counting)
    run_small(Taught(), rounds=1, epochs=4)
    assert len(seen) == 3, "once for each of the three clients, not once an epoch"


def test_a_live_teacher_under_augmentation_agrees_with_the_cached_one_without_it(run_small: RunSmall) -> None:
    class Taught(fedstill.FedAvg):
        def objective(self, client: fedstill.Client) -> Objective:
            predict = client.teacher(client.down["model"])
            return Objective(term=lambda batch, out: fedstill.kl(predict(batch).logits, out.logits))

    cached = run_small(Taught(), rounds=2)
    live = run_small(Taught(), rounds=2, augment="scale:1.0-1.0")
    torch.testing.assert_close(weights(cached), weights(live), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_buffer_policies(run_small: RunSmall, policy: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    result = run_small(model=model, buffers=policy, image_size=16)
    names = set(result.model.state_dict())
    assert ("2.running_mean" in names) == (policy == "average"), "statistics leave a client only to be averaged"
    dataset = fedstill.load_dataset("fashion-mini", image_size=16)
    with torch.no_grad():  # in the pieces that the run evaluates, which matter where the batch is what normalises
        parts = dataset.normalise(dataset.test.x).tensor_split(-(-len(dataset.test.y) // EVAL_BATCH))
        said = torch.cat([result.model(part) for part in parts])
    accuracy = float((said.argmax(1) == dataset.test.y).double().mean())
    assert accuracy == result.records[-1]["accuracy"], "the model that comes back is the one that was scored"


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_no_evaluation_meets_a_batch_of_one(policy: BufferPolicy) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=g), torch.arange(60) % 3
    held_out = torch.randn(251, 4, generator=g), torch.arange(251) % 3
    federation = from_clients([(x[:30], y[:30]), (x[30:], y[30:])], test=held_out)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    result = fedstill.run(data=federation, model=model, buffers=policy, rounds=1, engine="inline")
    assert result.summary["final_accuracy"] is not None


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_samples_that_are_asked_for_once_are_those_that_are_kept(kind: torch.dtype) -> None:
    x, y = (255 * torch.rand(20, 3, 4, 4)).to(kind), torch.arange(20)
    split = fedstill.Split(x.contiguous(memory_format=torch.channels_last), y)
    data = fedstill.Dataset("tiny", split, split, ("a", "b"), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    index = torch.tensor([3, 17, 4, 9])
    kept, once = (Samples(split.x, y, index, data.normalise, again=again) for again in (True, False))
    for ids in (torch.tensor([2, 0]), torch.tensor([1])):
        assert torch.equal(kept.x(ids), once.x(ids))
        assert kept.x(ids).stride() == once.x(ids).stride()
    assert torch.equal(torch.cat(list(kept.parts(3))), torch.cat(list(once.parts(3))))


def test_a_client_with_one_sample_can_train_a_network_with_batchnorm() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(31, 4, generator=g), torch.arange(31) % 3
    federation = from_clients([(x[:30], y[:30]), (x[30:], y[30:])], test=(x, y))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    result = fedstill.run(data=federation, model=model, participation=1.0, rounds=2, engine="inline")
    assert result.summary["dropped"] == 0


def test_tied_weights_are_trained_and_saved(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.out(torch.relu(self.b(torch.relu(self.a(x)))))
            return logits

    x, y = torch.randn(40, 4), torch.arange(40) % 3
    data = from_clients([(x[:20], y[:20]), (x[20:], y[20:])], test=(x, y))
    result = fedstill.run(data=data, model=Tied(), rounds=1, engine="inline", out=tmp_path / "run")
    state = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(state["a.weight"], state["b.weight"])
    assert torch.equal(state["a.weight"], result.model.state_dict()["a.weight"])


def test_without_a_global_test_set_the_clients_own_tests_remain(tmp_path: Path) -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    data = from_clients([(x[:30], y[:30]), (x[30:], y[30:])])
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    settings: dict[str, Any] = {"data": data, "model": model}
    first = fedstill.run(**settings, rounds=2, engine="inline", out=tmp_path / "run")
    assert first.summary["final_accuracy"] is None
    assert 0 <= first.summary["final_amp"] <= 1
    assert fedstill.resume(tmp_path / "run", **settings).summary == first.summary


def test_a_federation_is_not_divided_again() -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    data = from_clients([(x[:30], y[:30]), (x[30:], y[30:])])
    with pytest.raises(fedstill.SettingError, match="clients cannot be set"):
        fedstill.run(data=data, model=nn.Sequential(nn.Linear(4, 3)), clients=3)


def test_own_images_are_brought_to_the_size_that_the_model_needs() -> None:
    x = torch.randint(0, 256, (60, 28, 28), dtype=torch.uint8)
    data = fedstill.from_arrays(x, torch.arange(60) % 3)
    result = fedstill.run(data=data, model="lenet5", clients=3, rounds=1, partition="iid", engine="inline")
    assert result.summary["rounds"] == 1


def test_fedprox_is_a_frozen_dataclass_with_the_papers_names() -> None:
    assert FedProx(mu=0.5).mu == 0.5
    with pytest.raises(AttributeError):
        FedProx().mu = 1.0  # type: ignore[misc]


# --- optimisers ---


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (SGD, torch.optim.SGD, {}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (Adam, torch.optim.Adam, {"weight_decay": 0.01}),
    ],
)
def test_an_optimiser_takes_the_steps_of_pytorchs_own(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
    """Bit for bit, also where a parameter gets its first gradient late, and after its memory was kept and restored."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)), nn.Parameter(torch.randn(5))]
    other = [nn.Parameter(p.detach().clone()) for p in mine]
    a, b = ours(mine, 0.1, **settings), theirs(other, 0.1, **settings, fused=True)
    for step in range(6):
        a.clear()
        b.zero_grad()
        for p, q in list(zip(mine, other, strict=True))[: 1 if step < 2 and not settings.get("momentum") else 2]:
            p.grad = torch.randn(p.shape)  # not in the layout of the first
            q.grad = torch.empty_like(q).copy_(p.grad)
        if step == 4 and isinstance(a, Adam):
            kept = tree.decode(tree.encode(a.state()))
            a = Adam(mine, 0.1, **settings)
            a.restore(kept)
        if step == 5:
            a.lr = b.param_groups[0]["lr"] = 0.01
        a.step()
        b.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, other, strict=True)), step


def test_momentum_begins_with_the_first_gradient_however_late() -> None:
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    other = [nn.Parameter(p.detach().clone()) for p in mine]
    a, b = SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(other, 0.1, momentum=0.9, foreach=False)
    for step in range(4):
        for p, q in list(zip(mine, other, strict=True))[: 1 if step < 2 else 2]:
            p.grad = q.grad = torch.randn(p.shape)
        a.step()
        b.step()
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.slow
def test_training_does_not_load_the_compiler() -> None:
    """It would take every worker process over a second."""
    code = (
        "import sys, fedstill\n"
        "fedstill.run('fedkf', rounds=2, clients=2, participation=1.0, epochs=1, engine='inline', width=2, z_dim=3,"
        " fraction=0.1, image_size=16, model='cnn')\n"
        "print('torch._dynamo' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "False"
