"""FedKF: the two averages, what clients keep, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstill
from fedstill.data.federation import from_clients
from fedstill.methods.fedkf import FedKF
from fedstill.models import Classifier
from support.fedkf import SHAPE, TINY, moved
from support.recorder import Round
from support.runs import SMALL, RunSmall, numbers, weights
from support.wiretap import (
    LR,
    assert_as_declared,
    assert_same_network,
    assert_same_tree,
    client_of,
    client_states,
    global_test,
    local_round,
    model_copies,
    network,
    resumed_after_every_round,
    setup_of,
    taped,
)


def mean_of(pairs: list[tuple[int, Tensor]]) -> Tensor:
    """sum n_k w_k / sum n_k, in float64."""
    total = sum(n for n, _ in pairs)
    return torch.stack([n / total * w.double() for n, w in pairs]).sum(0)


def oca_after(tape: list[Round], cache_init: str) -> Tensor:
    """The mean over all clients' latest models; unseen clients left out, or with the initial weights."""
    w0, sizes = tape[0].down["model"], setup_of("fedkf").federation.sizes.tolist()
    cache = dict.fromkeys(range(len(sizes)), w0) if cache_init == "w0" else {}
    for crossed in tape:
        cache |= {k: up["model"] for k, up in crossed.up.items()}
    return mean_of([(sizes[k], w) for k, w in cache.items()])


def aca_after(tape: list[Round]) -> Tensor:
    return mean_of([(tape[-1].samples[k], up["model"]) for k, up in tape[-1].up.items()])


@pytest.mark.slow
@pytest.mark.parametrize("cache_init", ["seen", "w0"])
def test_student_and_teacher_are_the_means_over_active_and_over_all_clients(cache_init: str) -> None:
    # averages do not depend on how clients learn: gamma = 0 is quick
    result, tape = taped("fedkf", rounds=8, participation=0.34, cache_init=cache_init, gamma=0.0)
    w0 = tape[0].down["model"]
    assert torch.equal(tape[0].down["teacher"], w0)
    seen: set[int] = set()
    for t in range(1, len(tape)):
        seen |= set(tape[t - 1].up)
        torch.testing.assert_close(tape[t].down["model"].double(), aca_after(tape[:t]), rtol=1e-6, atol=1e-8)
        oca = oca_after(tape[:t], cache_init)
        torch.testing.assert_close(tape[t].down["teacher"].double(), oca, rtol=1e-6, atol=1e-8)
    assert len(set(tape[0].up)) < len(seen), "clients must have changed"
    oca, aca = oca_after(tape, cache_init), aca_after(tape)
    assert_same_network(oca.float(), _classifier(result.model))
    x, y = global_test()
    for record, vector in ((result.records[-1], oca), (result.records[-1]["also"]["ACA"], aca)):
        accuracy = float((network(vector.float())(x).argmax(1) == y).double().mean())
        assert record["accuracy"] == pytest.approx(accuracy, abs=0.002)


def _classifier(module: nn.Module) -> Classifier:
    assert isinstance(module, Classifier)
    return module


@pytest.mark.parametrize("cache_init", ["seen", "w0"])
def test_full_participation_makes_the_two_means_equal(cache_init: str) -> None:
    _, tape = taped("fedkf", rounds=5, participation=1.0, cache_init=cache_init, gamma=0.0)
    for crossed in tape:
        torch.testing.assert_close(crossed.down["teacher"], crossed.down["model"], rtol=1e-6, atol=1e-8)


def test_without_t1_one_model_is_sent_and_it_is_the_model() -> None:
    result, tape = taped("fedkf", t1=False, rounds=4, gamma=0.0)
    for t in range(1, len(tape)):
        assert set(tape[t].down) == {"model"}
        torch.testing.assert_close(tape[t].down["model"].double(), aca_after(tape[:t]), rtol=1e-6, atol=1e-8)
    assert_same_network(aca_after(tape).float(), _classifier(result.model))
    assert "also" not in result.records[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "copies"), [({}, 2), ({"t1": False}, 1)])
def test_what_crosses_is_what_is_declared(variant: dict[str, Any], copies: int) -> None:
    result, tape = taped("fedkf", **TINY, **variant)
    assert_as_declared("fedkf", tape, **TINY, **variant)
    for record, crossed in zip(result.records, tape, strict=True):
        assert model_copies(crossed.down) == len(crossed.down) == copies
        assert all(set(up) == {"model"} for up in crossed.up.values()), "the generator never leaves its client"
        size = 4 * len(crossed.down["model"])
        assert record["bytes_down"] == copies * size * len(crossed.up)
        assert record["bytes_up"] == size * len(crossed.up)


@pytest.mark.slow
def test_resumed_after_every_round_gives_the_same_bits(run_small: RunSmall, tmp_path: Path) -> None:
    settings = TINY | {"cache_init": "w0", "rounds": 3, "lr": LR}
    whole = run_small("fedkf", out=tmp_path / "whole", **settings)
    broken = resumed_after_every_round("fedkf", tmp_path / "broken", **settings)
    assert torch.equal(weights(broken), weights(whole))
    assert numbers(broken) == numbers(whole)
    states = client_states(tmp_path / "whole")
    assert len(states) > 3, "in the two rounds with a teacher"
    assert_same_tree(client_states(tmp_path / "broken"), states)


@pytest.mark.slow
def test_same_bits_in_worker_processes(run_small: RunSmall, tmp_path: Path) -> None:
    settings = TINY | {"rounds": 3}
    inline = run_small("fedkf", out=tmp_path / "inline", **settings)
    process = run_small("fedkf", out=tmp_path / "process", engine="process", workers=2, **settings)
    assert torch.equal(weights(inline), weights(process))
    assert numbers(inline) == numbers(process)
    assert_same_tree(client_states(tmp_path / "inline"), client_states(tmp_path / "process"))


def test_every_client_has_a_generator_of_its_own(run_small: RunSmall, tmp_path: Path) -> None:
    run_small("fedkf", out=tmp_path / "run", participation=1.0, rounds=2, **TINY)
    states = client_states(tmp_path / "run")
    assert len(states) == SMALL["clients"]
    made = {tuple(state["generator"][:50].tolist()) for state in states.values()}
    assert len(made) == len(states)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_pictures_are_images_with_values_from_0_to_1(count: int) -> None:
    setup = setup_of("fedkf", **TINY)
    assert setup.method.pictures(setup.task, {}, count) is None, "a client that never had a generator"
    w0 = setup.task.initial
    client = client_of(setup, 0, 2, {"model": w0, "teacher": moved(w0, 1)})
    local_round(setup.method, client)
    made = setup.method.pictures(setup.task, client.state, count)
    assert made is not None
    assert made.shape == (count, *SHAPE)
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1
    assert float(made.std()) > 0
    again = setup.method.pictures(setup.task, client.state, count)
    assert again is not None
    assert torch.equal(made, again)


def test_data_that_are_not_images_are_refused() -> None:
    g = torch.Generator().manual_seed(0)
    shares = [(torch.randn(10, 6, generator=g), torch.randint(0, 3, (10,), generator=g)) for _ in range(4)]
    federation = from_clients(shares, test=shares[0], test_fraction=0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(fedstill.SettingError, match=r"needs data of shape \(channels, height, width\), got \(6,\)"):
        fedstill.run("fedkf", data=federation, model=model, rounds=1, engine="inline")


def test_t1_on_top_of_fedkf_is_refused_since_fedkf_has_it(run_small: RunSmall) -> None:
    with pytest.raises(fedstill.SettingError, match="t1"):
        run_small("fedkf+t1", **TINY)


def test_the_papers_settings_are_the_defaults_but_for_the_width_of_the_generator() -> None:
    method = FedKF()
    assert (method.lambda1, method.lambda2, method.gamma, method.beta) == (0.01, 0.1, 1.0, 1e-3)
    assert (method.z_dim, method.width, method.cache_init, method.t1) == (100, 16, "seen", True)
    assert (method.gen_first, method.reset_generator, method.gen_adversarial) == (True, False, False)
    assert (method.ie_normalised, method.activation_mean) == (True, True)


def test_fedkf_refuses_a_network_that_shows_no_features(run_small: RunSmall) -> None:
    silent = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.LogSoftmax(dim=1))
    with pytest.raises(fedstill.SettingError, match="penultimate features"):
        run_small("fedkf", model=silent, **TINY)
