"""FedGKD, FedGKD-VOTE and FedGKD+ against the equations of their paper, written out."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedstill
from fedstill.methods import registry
from fedstill.methods.fedgkd import FedGKD
from fedstill.models import Classifier
from fedstill.models.heads import Projected
from fedstill.train.evaluate import Outputs
from fedstill.train.loop import Batch
from support.recorder import Round
from support.runs import SMALL, RunSmall, numbers, weights
from support.wiretap import (
    LR,
    Extra,
    Headed,
    assert_as_declared,
    assert_same_network,
    client_of,
    exact,
    held_by,
    kl_divergence,
    local_round,
    model_copies,
    network,
    resumed_after_every_round,
    setup_of,
    softmax,
    taped,
    trained,
    without,
)

REGULARISERS = ["kl", "mse"]


def moved(vector: Tensor, seed: int) -> Tensor:
    """Weights somewhere near."""
    return vector + 0.1 * torch.randn(len(vector), generator=torch.Generator().manual_seed(seed))


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(p || q), with the teacher's probabilities as p."""
    p, q = teacher.softmax(1).detach(), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def squared_error(teacher: Tensor, student: Tensor) -> Tensor:
    return ((student - teacher.detach()) ** 2).mean()


def taught_by(teachers: list[tuple[float, Tensor]], distance: Any = divergence, *, head: bool = False) -> Extra:
    """The sum of (weight, teacher) pairs as a loss to be added."""
    nets = [(weight, network(vector, head=head)) for weight, vector in teachers]

    def extra(net: Classifier, x: Tensor, y: Tensor) -> Tensor:
        terms = [weight * distance(teacher(x), net(x)) for weight, teacher in nets]
        return torch.stack(terms).sum()

    return extra


# --- FedGKD -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regulariser", REGULARISERS)
def test_the_loss_is_half_gamma_times_the_distance_from_the_teacher(regulariser: str) -> None:
    gamma = 0.7
    setup = setup_of("fedgkd", gamma=gamma, regulariser=regulariser)
    w0 = setup.task.initial
    down = {"model": moved(w0, 1), "teacher": moved(w0, 2)}
    client = client_of(setup, 3, 2, down)
    objective = setup.method.objective(client)
    x, y = held_by(3)
    ids = torch.tensor([5, 0, 7, 11, 3])
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert objective.term is not None
    loss = objective.term(Batch(x[ids], y[ids], ids), Outputs(logits, torch.zeros(5, 84)))
    loss.backward()

    teacher, student = exact(network(down["teacher"]), x[ids])[0], logits.detach().double().numpy()
    if regulariser == "kl":
        expected = gamma / 2 * kl_divergence(teacher, student).mean()
        slope = gamma / 2 * (softmax(student) - softmax(teacher)) / 5
    else:
        expected = gamma / 2 * ((student - teacher) ** 2).mean()
        slope = gamma / 2 * 2 * (student - teacher) / (5 * 10)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("augment", ["", "scale:1.0-1.0"])
def test_the_teacher_gets_no_gradient_and_stays_as_it_was_sent(augment: str) -> None:
    setup = setup_of("fedgkd", augment=augment)
    w0 = setup.task.initial
    down = {"model": moved(w0, 1), "teacher": moved(w0, 2)}
    sent = {name: vector.clone() for name, vector in down.items()}
    up = local_round(setup.method, client_of(setup, 0, 2, down))
    assert not torch.equal(up["model"], sent["model"])
    teacher = setup.task.nets.get("live teacher 1" if augment else "teacher")
    assert torch.equal(teacher.read(), sent["teacher"])
    assert all(p.grad is None for p in teacher.params)
    assert all(torch.equal(down[name], sent[name]) for name in sent)


@pytest.mark.slow
@pytest.mark.parametrize("regulariser", REGULARISERS)
def test_a_clients_round_equals_a_plain_loop_with_the_papers_loss(regulariser: str) -> None:
    _, tape = taped("fedgkd", gamma=3.0, buffer=2, regulariser=regulariser)
    distance = divergence if regulariser == "kl" else squared_error
    for crossed in tape[1:]:
        for k, up in crossed.up.items():
            extra = taught_by([(1.5, crossed.down["teacher"])], distance)
            assert_same_network(up["model"], trained(crossed.down["model"], k, crossed.number, extra))
            plain = trained(crossed.down["model"], k, crossed.number)
            assert not torch.allclose(
                torch.cat([p.flatten() for p in plain.parameters()]),
                torch.cat([p.flatten() for p in network(up["model"]).parameters()]),
                rtol=2e-4,
                atol=2e-6,
            ), "the teacher must make a difference for this test to say anything"


@pytest.mark.parametrize("buffer", [2, 4])
def test_the_teacher_is_the_mean_of_the_last_global_models(buffer: int) -> None:
    _, tape = taped("fedgkd", buffer=buffer, rounds=6)
    made = [crossed.down["model"] for crossed in tape[1:]]  # w_1, w_2, …: what rounds 1, 2, … made
    for t, crossed in enumerate(tape[1:], start=1):
        last = made[max(0, t - buffer) : t]
        mean = torch.stack(last).double().mean(0)
        assert torch.equal(last[-1], crossed.down["model"])
        torch.testing.assert_close(crossed.down["teacher"].double(), mean, rtol=1e-6, atol=1e-8)


def test_there_is_no_teacher_in_the_first_round() -> None:
    _, plain = taped("fedavg", rounds=1)
    for settings in ({"buffer": 5}, {"buffer": 1, "regulariser": "mse"}):
        _, taught = taped("fedgkd", rounds=1, gamma=50.0, **settings)
        for k, up in plain[0].up.items():
            assert torch.equal(taught[0].up[k]["model"], up["model"])


def test_with_gamma_zero_it_is_fedavg(run_small: RunSmall) -> None:
    plain, headed = run_small("fedavg"), run_small(Headed())
    for method, other in (("fedgkd", plain), ("fedgkd-plus", headed)):
        for settings in ({"buffer": 5}, {"buffer": 1, "regulariser": "mse"}):
            zero = run_small(method, gamma=0.0, **settings)
            assert torch.equal(weights(zero), weights(other))
            assert without(numbers(zero), "bytes_down") == without(numbers(other), "bytes_down")
    assert not torch.equal(weights(run_small("fedgkd", gamma=1.0)), weights(plain))


def test_a_vanishing_gamma_approaches_fedavg(run_small: RunSmall) -> None:
    torch.testing.assert_close(
        weights(run_small("fedgkd", gamma=1e-9)), weights(run_small("fedavg")), rtol=1e-4, atol=1e-6
    )


def test_a_buffer_of_one_sends_one_model_which_is_the_teacher() -> None:
    _, tape = taped("fedgkd", gamma=3.0, buffer=1)
    for crossed in tape[1:]:
        assert set(crossed.down) == {"model"}
        for k, up in crossed.up.items():
            extra = taught_by([(1.5, crossed.down["model"])])
            assert_same_network(up["model"], trained(crossed.down["model"], k, crossed.number, extra))


def test_one_buffered_model_teaches_like_a_buffer_of_one() -> None:
    _, one = taped("fedgkd", buffer=1, rounds=2, gamma=2.0)
    _, five = taped("fedgkd", buffer=5, rounds=2, gamma=2.0)
    for k, up in one[1].up.items():
        assert torch.equal(five[1].up[k]["model"], up["model"])


def test_the_papers_settings_are_the_defaults() -> None:
    assert (
        registry.settings_of(registry.make("fedgkd")).items()
        >= {"gamma": 0.2, "buffer": 5, "regulariser": "kl"}.items()
    )
    vote = registry.settings_of(registry.make("fedgkd-vote"))
    assert (vote["lambda"], vote["buffer"]) == (0.1, 5)


# --- FedGKD-VOTE ------------------------------------------------------------------------------------------------


def validation_losses(models: list[Tensor], **settings: Any) -> list[float]:
    """Cross-entropy of each model on the server's samples, in float64."""
    setup = setup_of("fedgkd-vote", **settings)
    index = torch.from_numpy(setup.federation.pool_index)
    dataset = setup.federation.dataset
    x, y = dataset.normalise(dataset.train.x[index]), dataset.train.y[index].numpy()
    found = []
    for model in models:
        p = softmax(exact(network(model), x)[0])
        found.append(float(-np.log(p[np.arange(len(y)), y]).mean()))
    return found


def vote_weights(losses: list[float], lambda_: float, beta: float) -> list[float]:
    shares = [math.exp(-(loss - min(losses)) / beta) for loss in losses]
    return [lambda_ * share / sum(shares) for share in shares]


def taught_models(crossed: Round, buffer: int) -> list[Tensor]:
    """The global models of a VOTE message, newest first."""
    names = ["model", *(f"model-{m}" for m in range(1, buffer))]
    return [crossed.down[name] for name in names if name in crossed.down]


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_the_votes_are_the_softmax_of_the_validation_losses(beta: float) -> None:
    pool = {"pool": 0.2}
    _, tape = taped("fedgkd-vote", buffer=3, rounds=6, beta=beta, lr=0.2, **{"lambda": 0.4}, **pool)
    assert set(tape[0].down) == {"model", "votes"}
    for t, crossed in enumerate(tape[1:], start=1):
        models = taught_models(crossed, 3)
        assert len(models) == min(t, 3), "as many as rounds have made, never the initial weights"
        for older, newer in pairwise(reversed(models)):
            rounds = [r.down["model"] for r in tape[: t + 1]]
            at = next(i for i, w in enumerate(rounds) if torch.equal(w, older))
            assert torch.equal(rounds[at + 1], newer)
        votes = vote_weights(validation_losses(models, **pool), 0.4, beta or 1 / 3)
        expected = [*votes, *[0.0] * (3 - len(votes))]
        np.testing.assert_allclose(crossed.down["votes"].numpy(), expected, rtol=1e-4)
        assert float(crossed.down["votes"].sum()) == pytest.approx(0.4, rel=1e-6), "the total weight is lambda"


def test_a_clients_vote_round_equals_a_plain_loop_with_the_papers_loss() -> None:
    settings: dict[str, Any] = {"pool": 40, "lambda": 2.0, "buffer": 3}
    _, tape = taped("fedgkd-vote", rounds=4, **settings)
    setup = setup_of("fedgkd-vote", **settings)
    dataset = setup.federation.dataset
    crossed = tape[-1]
    models = taught_models(crossed, 3)
    teachers = list(zip(vote_weights(validation_losses(models, **settings), 2.0, 1 / 3), models, strict=True))
    assert len(teachers) == 3
    for k, up in crossed.up.items():
        net, extra = network(crossed.down["model"]), taught_by(teachers)
        index = torch.from_numpy(setup.federation.train(k))
        x, y = dataset.normalise(dataset.train.x[index]), dataset.train.y[index]
        client = client_of(setup, k, crossed.number, crossed.down)
        for ids in torch.randperm(len(y), generator=client.stream("batches")).split(SMALL["batch_size"]):
            loss = F.cross_entropy(net(x[ids]), y[ids]) + extra(net, x[ids], y[ids])
            params = list(net.parameters())
            with torch.no_grad():
                for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                    p.sub_(LR * grad)
        assert_same_network(up["model"], net)


def test_vote_with_lambda_zero_is_fedavg(run_small: RunSmall) -> None:
    plain, vote = run_small("fedavg", pool=0.1), run_small("fedgkd-vote", pool=0.1, **{"lambda": 0.0})
    assert torch.equal(weights(vote), weights(plain))
    assert without(numbers(vote), "bytes_down") == without(numbers(plain), "bytes_down")


@pytest.mark.slow
@pytest.mark.parametrize("regulariser", REGULARISERS)
def test_vote_of_one_model_is_fedgkd_of_one_model(run_small: RunSmall, regulariser: str) -> None:
    common: dict[str, Any] = {"pool": 0.1, "buffer": 1, "regulariser": regulariser}
    vote = run_small("fedgkd-vote", **common, **{"lambda": 0.5})
    assert torch.equal(weights(vote), weights(run_small("fedgkd", **common, gamma=1.0)))
    assert not torch.equal(weights(vote), weights(run_small("fedavg", pool=0.1)))


@pytest.mark.parametrize("method", ["fedgkd-vote", "fedgkd-vote+t1"])
def test_vote_without_samples_on_the_server_is_refused(run_small: RunSmall, method: str) -> None:
    with pytest.raises(fedstill.SettingError, match=r"needs labelled samples on the server: set pool"):
        run_small(method)


# --- FedGKD+ ----------------------------------------------------------------------------------------------------


class HeadedFedGKD(FedGKD):
    def network(self, net: Classifier) -> Classifier:
        return Projected(net)


def test_fedgkd_plus_is_fedgkd_on_the_network_with_the_head(run_small: RunSmall) -> None:
    plus = run_small("fedgkd-plus", gamma=1.0)
    assert torch.equal(weights(plus), weights(run_small(HeadedFedGKD(gamma=1.0))))
    names = list(plus.model.state_dict())
    assert [name for name in names if name.startswith("head")] == ["head.weight", "head.bias"]
    assert plus.model.state_dict()["head.weight"].shape == (10, 256)


def test_a_fedgkd_plus_round_equals_a_plain_loop() -> None:
    _, tape = taped("fedgkd-plus", gamma=3.0, buffer=2)
    crossed = tape[-1]
    for k, up in crossed.up.items():
        extra = taught_by([(1.5, crossed.down["teacher"])], head=True)
        expected = trained(crossed.down["model"], k, crossed.number, extra, head=True)
        assert_same_network(up["model"], expected, head=True)


# --- all three --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "copies"),
    [
        ("fedgkd", {"buffer": 1}, [1, 1, 1, 1]),
        ("fedgkd", {"buffer": 5}, [2, 2, 2, 2]),
        ("fedgkd-plus", {"buffer": 2}, [2, 2, 2, 2]),
        ("fedgkd-vote", {"buffer": 1, "pool": 0.1}, [1, 1, 1, 1]),
        ("fedgkd-vote", {"buffer": 3, "pool": 0.1}, [1, 1, 2, 3]),
    ],
)
def test_what_crosses_is_what_is_declared(method: str, settings: dict[str, Any], copies: list[int]) -> None:
    result, tape = taped(method, rounds=4, **settings)
    assert_as_declared(method, tape, **settings)
    assert [model_copies(crossed.down) for crossed in tape] == copies
    assert all(set(up) == {"model"} for crossed in tape for up in crossed.up.values())
    for record, crossed in zip(result.records, tape, strict=True):
        sent = sum(tensor.numel() * 4 for tensor in crossed.down.values())
        assert record["bytes_down"] == sent * len(crossed.up)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), [("fedgkd", {}), ("fedgkd-vote", {"pool": 0.1})])
def test_resumed_after_every_round_gives_the_same_bits(
    run_small: RunSmall, tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    settings = settings | {"buffer": 2, "rounds": 3, "lr": LR}
    whole = run_small(method, **settings)
    broken = resumed_after_every_round(method, tmp_path / "run", **settings)
    assert torch.equal(weights(broken), weights(whole))
    assert numbers(broken) == numbers(whole)
