"""The ground layer: trees as bytes, flat networks, client state, random streams, means, fairness, and the layers."""

from __future__ import annotations

import ast
import contextlib
import math
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedstill
from fedstill.aggregate.mean import RunningMean, weighted_mean
from fedstill.core import custom, seeds, tree
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.store import Store
from fedstill.core.weights import FlatNet
from fedstill.metrics.fairness import fairness

few = settings(max_examples=60, deadline=None)

# --- trees as bytes ---

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = draw(st.lists(st.integers(0, 100), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(numbers, dtype=torch.int64).view(shape).to(draw(st.sampled_from(DTYPES)))


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()
keys = st.text().filter(lambda k: k != "$tensor")
trees = st.recursive(leaves, lambda node: st.lists(node, max_size=4) | st.dictionaries(keys, node, max_size=4))


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, in types and dtypes too, NaN being equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.mark.slow
@few
@given(trees)
def test_a_tree_survives_the_way_through_bytes(given_: Any) -> None:
    assert same(tree.decode(tree.encode(given_)), given_)


def test_tensors_that_share_memory_arrive_as_they_were() -> None:
    w = torch.arange(10.0)
    sent = {"model": w, "teacher": w, "head": w[2:5], "middle": w[4:8]}
    received = tree.decode(tree.encode(sent))
    assert same(received, sent)
    received["model"][0] = 99
    assert received["teacher"][0] == 0, "what is received shares nothing"


def test_a_small_view_of_a_large_tensor_is_sent_small() -> None:
    assert len(tree.encode({"part": torch.zeros(100_000)[:3]})) < 1000


def test_a_tensor_that_is_not_contiguous_keeps_its_values() -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    assert same(tree.decode(tree.encode([image, image.mT])), [image, image.mT])


def test_gradients_stay_behind() -> None:
    received = tree.decode(tree.encode(torch.ones(2, requires_grad=True)))
    assert not received.requires_grad


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), {1: "one"}, {"$tensor": "0"}, b"bytes"])
def test_what_cannot_be_a_tree_is_refused_when_it_is_written(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be kept or sent"):
        tree.encode({"state": value})


def test_a_sparse_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match="make it dense"):
        tree.encode(torch.zeros(3).to_sparse())


WHOLE = tree.encode({"w": torch.arange(20.0), "b": torch.ones(3), "round": 4})


@few
@given(st.integers(0, len(WHOLE) - 1))
def test_a_truncated_tree_is_damaged_data(length: int) -> None:
    with pytest.raises(DataError, match="damaged"):
        tree.decode(WHOLE[:length])


@few
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_damaged_data(data: bytes) -> None:
    with pytest.raises(DataError, match="damaged"):
        tree.decode(data)


@few
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_tree_or_damaged_data_and_no_other_error(place: int, value: int) -> None:
    data = bytearray(WHOLE)
    data[place] = value
    with contextlib.suppress(DataError):
        tree.decode(bytes(data))


@pytest.mark.parametrize("shape", ['{"a": {"$tensor": "7"}}', '{"$tensor": [1]}', "[" * 100_000, "nonsense"])
def test_a_tree_that_names_tensors_it_does_not_hold_is_damaged_data(shape: str) -> None:
    from safetensors.torch import save

    with pytest.raises(DataError, match="damaged"):
        tree.decode(save({"0": torch.ones(2)}, metadata={"tree": shape}))


class Bomb:
    built = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "built", True)


def test_a_pickle_is_never_built() -> None:
    for data in (pickle.dumps(Bomb()), pickle.dumps({"model": Bomb()}, protocol=0)):
        with pytest.raises(DataError):
            tree.decode(data)
    assert not Bomb.built
    source = Path(fedstill.__file__).parent
    reading = ("pickle.load", "torch.load", "allow_pickle=True", "marshal", "shelve", "dill", "cloudpickle")
    for file in source.rglob("*.py"):
        text = file.read_text()
        assert not any(word in text for word in reading), file


def test_bytes_of_a_message_are_those_of_its_tensors() -> None:
    assert tree.nbytes({"w": torch.zeros(10), "n": torch.zeros(3, dtype=torch.int64), "e": torch.zeros(0)}) == 64
    assert tree.nbytes({"nested": [torch.zeros(2), 1.0, None]}) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_part_that_is_not_finite_is_named(bad: float) -> None:
    message = {"count": torch.ones(2, dtype=torch.int64), "good": torch.ones(2), "bad": torch.tensor([1.0, bad])}
    assert tree.first_not_finite(message) == "bad"
    assert tree.first_not_finite({"both": torch.tensor([math.inf, -math.inf])}) == "both"


def test_finite_numbers_whose_sum_overflows_are_finite() -> None:
    assert tree.first_not_finite({"large": torch.full((4,), 3e38)}) is None


# --- flat networks ---


class Net(nn.Module):
    """Convolution, BatchNorm (with its integer counter), a constant, a scalar, a frozen layer and a tied one."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (2, 4))
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("constant", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.norm(self.conv(x)).mean((2, 3)) * self.scale + self.constant
        logits: Tensor = self.decode(self.encode(self.frozen(pooled)))
        return logits


def state(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors by name."""
    return dict(module.state_dict())


def small_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net(torch.randn(4, 2, 5, 6))  # so that the statistics are not the initial ones
    return net


IN_VECTOR = ["scale", "conv.weight", "conv.bias", "norm.weight", "norm.bias", "encode.weight"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_the_vector_holds_trainable_parameters_in_order_and_then_buffers() -> None:
    flat = FlatNet(small_net())
    assert [e.name for e in flat.entries] == IN_VECTOR + BUFFERS
    assert [e.name for e in flat.entries if e.trainable] == IN_VECTOR
    trainable = 1 + 3 * 2 * 2 * 4 + 3 + 3 + 3 + 9
    assert flat.trainable == trainable
    assert flat.size == trainable + 3 + 3 + 1


def test_neither_frozen_parameters_nor_constants_are_in_the_vector() -> None:
    module = small_net()
    frozen = module.frozen.weight.clone()
    flat = FlatNet(module)
    flat.load(torch.zeros(flat.size))
    assert torch.equal(module.frozen.weight, frozen)
    assert torch.equal(module.constant, torch.arange(3.0))


def test_unflatten_gives_the_state_dict() -> None:
    module = small_net()
    expected = {k: v.clone() for k, v in module.state_dict().items()}
    flat = FlatNet(module)
    named = flat.unflatten(flat.read())
    assert list(named) == IN_VECTOR + BUFFERS
    for name, tensor in named.items():
        assert tensor.shape == expected[name].shape
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    assert torch.equal(named["encode.weight"], expected["decode.weight"]), "tied weights are kept once"


def test_making_a_network_flat_does_not_change_what_it_computes() -> None:
    x = torch.randn(3, 2, 5, 6)
    expected = small_net().eval()(x)
    torch.testing.assert_close(FlatNet(small_net()).module.eval()(x), expected)


def test_parameters_and_float_buffers_are_views_of_the_vector() -> None:
    module = small_net()
    flat = FlatNet(module)
    flat.vector.fill_(2.0)
    for tensor in (*flat.params, state(module)["norm.running_var"]):
        assert torch.equal(tensor, torch.full_like(tensor, 2.0))
    state(module)["conv.bias"][1] = 7.0
    assert flat.read()[flat.entries[2].start + 1] == 7.0


def test_convolutions_lie_in_channels_last_order() -> None:
    module = small_net()
    expected = module.conv.weight.detach().permute(0, 2, 3, 1).flatten().clone()
    flat = FlatNet(module)
    entry = flat.entries[1]
    assert torch.equal(flat.vector[entry.start : entry.stop], expected)
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_load_and_read_are_inverse_and_read_is_a_copy() -> None:
    flat, other = FlatNet(small_net(0)), FlatNet(small_net(1))
    vector = other.read()
    flat.load(vector)
    assert torch.equal(flat.read(), vector)
    flat.read().zero_()
    assert torch.equal(flat.read(), vector)


def test_integer_buffers_travel_with_the_vector() -> None:
    module = small_net()
    flat = FlatNet(module)
    assert state(module)["norm.num_batches_tracked"].dtype == torch.int64
    assert flat.read()[-1] == 1
    module.train()(torch.randn(4, 2, 5, 6))
    vector = flat.read()
    assert vector[-1] == 2
    vector[-1] = 41
    flat.load(vector)
    assert state(module)["norm.num_batches_tracked"].item() == 41


def test_tied_parameters_stay_tied() -> None:
    module = small_net()
    flat = FlatNet(module)
    assert module.encode.weight is module.decode.weight
    flat.load(torch.arange(flat.size, dtype=torch.float32))
    assert torch.equal(module.encode.weight, module.decode.weight)


def test_training_moves_the_vector() -> None:
    flat = FlatNet(small_net())
    before = flat.read()
    flat.module(torch.randn(4, 2, 5, 6)).sum().backward()
    torch.optim.SGD(flat.params, lr=0.1).step()
    gradient = torch.cat(
        [
            p.grad.permute(0, 2, 3, 1).flatten() if p.ndim == 4 else p.grad.flatten()
            for p in flat.params
            if p.grad is not None
        ]
    )
    torch.testing.assert_close(flat.read()[: flat.trainable], before[: flat.trainable] - 0.1 * gradient)


def test_split_gives_views_shaped_as_the_parameters() -> None:
    flat = FlatNet(small_net())
    vector = torch.randn(flat.trainable)
    parts = flat.split(vector)
    assert [p.shape for p in parts] == [p.shape for p in flat.params]
    parts[0].fill_(5.0)
    assert vector[0] == 5.0


def test_parameters_of_several_dtypes_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(SettingError, match="one floating dtype"):
        FlatNet(mixed)


def test_a_network_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(SettingError, match="no trainable parameters"):
        FlatNet(nn.Sequential(nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)))


def test_a_network_of_doubles_has_a_vector_of_doubles() -> None:
    assert FlatNet(nn.Linear(2, 2).double()).vector.dtype == torch.float64


# --- client state ---


def versions(store: Store, client: int) -> list[int]:
    return sorted(int(p.name.split(".")[1]) for p in store.root.rglob(f"{client}.*.safetensors"))


def test_a_client_that_was_never_active_has_no_state_and_no_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients")
    assert store.read(3, before=10) is None
    assert not store.root.exists()


def test_a_round_reads_what_the_newest_earlier_round_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round_ in (1, 4, 12):
        store.write(7, round_, {"written": round_, "w": torch.full((2,), float(round_))})
    store.write(70, 5, {"written": "by another"})
    expected = {1: None, 2: 1, 4: 1, 5: 4, 12: 4, 13: 12, 100: 12}
    for before, written in expected.items():
        state = store.read(7, before=before)
        assert (state and state["written"]) == written
    assert same(store.read(7, before=13), {"written": 12, "w": torch.full((2,), 12.0)})


def test_a_repeated_round_replaces_what_its_first_attempt_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(0, 3, {"attempt": 1})
    store.write(0, 3, {"attempt": 2})
    assert store.read(0, before=4) == {"attempt": 2}
    assert versions(store, 0) == [3]


def test_rollback_forgets_the_rounds_after(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for client in (1, 250):
        for round_ in (2, 3, 4, 5):
            store.write(client, round_, {"written": round_})
    store.rollback(3)
    for client in (1, 250):
        assert versions(store, client) == [2, 3]
        assert store.read(client, before=10**9) == {"written": 3}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=8), st.integers(1, 3))
def test_pruning_keeps_what_the_last_two_checkpoints_need(cohorts: list[set[int]], every: int) -> None:
    """Whatever rounds clients were active in, going back to either checkpoint finds the state of that moment."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store, kept, active = Store(Path(folder)), [0], set[int]()
        for round_, cohort in enumerate(cohorts, start=1):
            for client in cohort:
                store.write(client, round_, {"written": round_})
            active |= cohort
            if round_ % every == 0:
                kept = [*kept, round_][-2:]
                store.prune(sorted(active), needed=kept[0])
                active.clear()
        for checkpoint in reversed(kept):
            store.rollback(checkpoint)
            for client in range(4):
                rounds = [r for r, cohort in enumerate(cohorts, start=1) if client in cohort and r <= checkpoint]
                expected = {"written": max(rounds)} if rounds else None
                assert store.read(client, before=checkpoint + 1) == expected


def test_pruning_deletes_what_no_checkpoint_needs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round_ in range(1, 7):
        store.write(2, round_, {})
    store.prune([2], needed=5)
    assert versions(store, 2) == [5, 6]


def test_damaged_state_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(2, 1, {"w": torch.ones(3)})
    file = next(tmp_path.rglob("2.1.safetensors"))
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(DataError, match=r"2\.1\.safetensors.*damaged"):
        store.read(2, before=2)


# --- random streams ---


@few
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 5)), unique=True)
)
def test_streams_of_different_seeds_purposes_rounds_and_clients_differ(places: list[tuple[int, str, int, int]]) -> None:
    assert len({seeds.key(*place) for place in places}) == len(places)


def test_round_and_client_are_not_exchangeable() -> None:
    assert seeds.key(0, "batches", 1, 2) != seeds.key(0, "batches", 2, 1)
    assert seeds.key(0, "batches", 1) != seeds.key(1, "batches", 0)


def test_streams_give_the_same_numbers_in_another_process() -> None:
    code = (
        "from fedstill.core import seeds; import torch\n"
        "print(seeds.key(3, 'cohort', 7), seeds.numpy_rng(3, 'cohort', 7).integers(0, 1000, 4).tolist(),"
        " torch.randperm(6, generator=seeds.torch_rng(3, 'batches', 7, 1)).tolist())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "12345"}
    )
    ours = (
        seeds.key(3, "cohort", 7),
        seeds.numpy_rng(3, "cohort", 7).integers(0, 1000, 4).tolist(),
        torch.randperm(6, generator=seeds.torch_rng(3, "batches", 7, 1)).tolist(),
    )
    assert other.stdout.split("\n")[0] == " ".join(map(str, ours))


def test_a_key_is_what_numpy_documents_for_the_seed_sequence() -> None:
    """0x414FA339 is the published CRC-32 of the sentence; the sequence's algorithm is fixed by NumPy's policy."""
    sentence = "The quick brown fox jumps over the lazy dog"
    state = np.random.SeedSequence([5, 0x414FA339, 2, 9]).generate_state(2, np.uint32)
    expected = (int(state[0]) | int(state[1]) << 32) >> 1
    assert seeds.key(5, sentence, 2, 9) == expected


# --- weighted means ---

vectors = st.integers(1, 6).flatmap(
    lambda length: st.lists(
        st.tuples(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=length, max_size=length),
            st.floats(0, 1e4, allow_subnormal=False),
        ),
        min_size=1,
        max_size=8,
    )
)


@few
@given(vectors)
def test_the_weighted_mean_is_numpys_in_float64(pairs: list[tuple[list[float], float]]) -> None:
    values = np.array([v for v, _ in pairs], np.float32).astype(np.float64)
    weights = np.array([w for _, w in pairs])
    given_ = [(torch.tensor(v, dtype=torch.float32), w) for v, w in pairs]
    if weights.sum() <= 0:
        with pytest.raises(FedstillError, match="positive weight"):
            weighted_mean(given_)
        return
    mean = weighted_mean(given_)
    expected = (weights[:, None] * values).sum(axis=0) / weights.sum()
    assert mean.dtype == torch.float32
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_a_weight_of_zero_changes_no_bit() -> None:
    a, b, c = (torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert torch.equal(weighted_mean([(a, 3), (b, 0), (c, 2)]), weighted_mean([(a, 3), (c, 2)]))


def test_the_mean_of_equal_vectors_is_that_vector() -> None:
    v = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weighted_mean([(v, n) for n in (7, 1, 300, 49)]), v)


def test_the_sum_runs_in_the_order_given() -> None:
    """1e16 + 1 + 1 + ... loses every 1, and 1 + 1 + ... + 1e16 none: the result shows the order of the sum."""
    large, ones = torch.tensor([1e16], dtype=torch.float64), [torch.ones(1, dtype=torch.float64)] * 4
    assert weighted_mean([(v, 1) for v in (large, *ones)]).item() == 1e16 / 5
    assert weighted_mean([(v, 1) for v in (*ones, large)]).item() == (1e16 + 4) / 5


def test_the_mean_takes_vectors_one_at_a_time() -> None:
    alive: list[Tensor] = []

    def stream() -> Iterable[tuple[Tensor, float]]:
        for k in range(5):
            vector = torch.full((3,), float(k))
            alive.append(vector)
            yield vector, 1.0
            vector.fill_(math.nan)  # what was added is not looked at again

    assert torch.equal(weighted_mean(stream()), torch.full((3,), 2.0))


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(FedstillError, match="nothing to average"):
        RunningMean().result()


# --- fairness ---


@few
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=8))
def test_fairness_is_what_loops_over_the_clients_give(clients: list[list[bool]]) -> None:
    correct = np.array([hit for client in clients for hit in client], bool)
    offsets = np.cumsum([0, *map(len, clients)])
    found = fairness(correct, offsets)

    local = [sum(client) / len(client) if client else math.nan for client in clients]
    np.testing.assert_array_equal(found.local, local)
    known = [a for a in local if not math.isnan(a)]
    if not known:
        assert math.isnan(found.amp)
        assert math.isnan(found.fm)
        assert math.isnan(found.wlp)
        return
    mean = sum(known) / len(known)
    assert found.amp == pytest.approx(sum(map(sum, clients)) / sum(map(len, clients)))
    assert found.fm == pytest.approx(sum((a - mean) ** 2 for a in known) / len(known))
    assert found.wlp == min(known)


def test_the_worst_client_is_one_that_has_test_samples() -> None:
    found = fairness(np.array([True, True, False, True]), np.array([0, 0, 2, 2, 4]))
    assert (found.wlp, found.amp, found.fm) == (0.5, 0.75, 0.0625)


def test_equal_accuracies_are_perfectly_fair() -> None:
    assert fairness(np.array([True, False] * 3), np.array([0, 2, 4, 6])).fm == 0.0


# --- files of the user's own ---


def test_a_users_file_is_run_once_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"with open({str(tmp_path / 'runs')!r}, 'a') as f: f.write('x')\nvalue = 1\n")
    assert [custom.load(f"{file}:value") for _ in range(3)] == [1, 1, 1]
    assert (tmp_path / "runs").read_text() == "x"
    file.write_text("value = 'changed'\n")
    assert custom.load(f"{file}:value") == "changed"


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "mine.py").write_text(
            f"value = {i}\ndef get(): return value, __import__('sys').modules[__name__].value\n"
        )
    first, second = (custom.load(f"{tmp_path / str(i)}/mine.py:get") for i in (1, 2))
    assert (first(), second()) == ((1, 1), (2, 2))


# --- layers ---

LAYERS = (  # from top to bottom; packages of one layer do not import each other
    {"cli"},
    {"board"},
    {"analysis", "deployment"},
    {"studies"},
    {"running"},
    {"report", "building"},
    {"flower", "presets"},
    {"engine"},
    {"methods"},
    {"distill", "aggregate"},
    {"train"},
    {"models", "attacks"},
    {"data", "metrics"},
    {"core"},
)
SOURCE = Path(fedstill.__file__).parent
MODULES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE)


def allowed(layer: str) -> set[str]:
    """The packages a layer may import from: its own and those below, not those beside it."""
    level = next(i for i, names in enumerate(LAYERS) if layer in names)
    return {layer}.union(*LAYERS[level + 1 :])


def imported(path: Path) -> set[str]:
    """The packages of fedstill that a file imports from, wherever in it; `.` for the root."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] if "." in name else "." for name in names if name.split(".")[0] == "fedstill"}
    return found


def test_every_package_has_its_place_in_the_layers() -> None:
    packages = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert packages == set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_only_downwards(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0]
    assert imported(path) <= allowed(layer)


def test_the_check_of_the_layers_sees_an_import_that_goes_upwards(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "def f():\n    from fedstill.cli import main\n    import fedstill.engine.base\n    import fedstill\n"
    )
    assert imported(file) == {"cli", "engine", "."}
    assert not imported(file) & allowed("core")


def test_a_file_that_cannot_be_imported_leaves_no_half_of_a_module(tmp_path: Path) -> None:
    """Else workers elsewhere, which are given every file of the user's, fail at this one in every later run."""
    before = set(sys.modules)
    (tmp_path / "mine.py").write_text("x = 1\nraise ValueError('no')\n")
    with pytest.raises(SettingError, match="cannot be imported"):
        custom.load(f"{tmp_path}/mine.py:x")
    assert not {name for name in set(sys.modules) - before if name.startswith("fedstill_user")}
