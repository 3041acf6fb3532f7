"""What people give to a run from Python: what is taken, and one line for what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fedstill
from fedstill import DataError, Dataset, Federation, FedstillError, SettingError, from_torch
from fedstill.building.config import resolve
from fedstill.building.given import as_data, as_model
from fedstill.building.setup import prepare
from fedstill.cli.commands import config_of
from support.commandline import fedstill as command

X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
RUN: dict[str, Any] = {"clients": 2, "partition": "iid", "rounds": 1, "epochs": 1, "engine": "inline"}


class Pictures(TorchDataset[Any]):
    """As torchvision's are: PIL images with targets, class names, and a transform."""

    classes = ("cat", "dog", "owl")

    def __init__(self, sizes: tuple[tuple[int, int], ...] = ((8, 6),), transform: Any = None) -> None:
        self.sizes, self.transform = sizes, transform
        self.targets = [n % 2 for n in range(20)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.new("RGB", self.sizes[index % len(self.sizes)], (10 * index, 0, 0))
        return (self.transform(image) if self.transform else image), self.targets[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)])


def dataset(given: object) -> Dataset:
    found = as_data(given)
    assert isinstance(found, Dataset)
    return found


def test_pairs_of_arrays_and_datasets_of_pytorch_are_data() -> None:
    assert (len(dataset((X, Y)).train), len(dataset((X, Y)).test)) == (24, 6)
    assert len(dataset((X, Y.astype(str), X[:5], Y[:5].astype(str))).test) == 5
    assert len(dataset((torch.from_numpy(X), torch.from_numpy(Y))).train) == 24
    pairs = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert len(dataset(pairs).train) == 24
    assert len(dataset((pairs, Subset(pairs, range(7)))).test) == 7
    assert as_data(Path("some/where")) == str(Path("some/where"))
    assert as_data("mnist") == "mnist"


def test_a_dataset_of_pictures_keeps_its_class_names_and_its_pixels() -> None:
    for given in (Pictures(), Subset(Pictures(), range(20))):
        data = from_torch(given)
        assert data.classes == ("cat", "dog", "owl")
        assert tuple(data.shape) == (3, 6, 8)
        reds = torch.cat([data.train.x, data.test.x])[:, 0, 0, 0]
        assert sorted(reds.tolist()) == [10 * n for n in range(20)]
        assert torch.equal(reds // 10 % 2, torch.cat([data.train.y, data.test.y]))


def test_a_datasets_transform_is_respected() -> None:
    data = from_torch(Pictures(transform=lambda image: torch.tensor([image.getpixel((0, 0))[0] / 255, 1.0])))
    assert (tuple(data.shape), data.train.x.dtype, data.mean) == ((2,), torch.float32, ())


def test_pictures_of_different_sizes_get_the_most_common_one() -> None:
    data = from_torch(Pictures(sizes=((8, 6), (8, 6), (5, 5))))
    assert (tuple(data.shape), data.original_size) == ((3, 6, 8), "of 2 sizes, mostly 8x6,")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([(torch.zeros(2), 0, 1)] * 5, "sample 0 is 3 things; a pair of a sample and its label is needed"),
        ([{"x": 1}] * 5, "sample 0 is a dict; a pair"),
        ([(torch.zeros(2), torch.zeros(3))] * 5, "the label of sample 0 has 3 numbers"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 1)] * 3, "samples have different shapes"),
        ([], "no samples"),
    ],
)
def test_datasets_of_other_things_are_refused_in_one_line(items: list[Any], message: str) -> None:
    class Listed(TorchDataset[Any]):
        def __len__(self) -> int:
            return len(items)

        def __getitem__(self, index: int) -> Any:
            return items[index]

    with pytest.raises(DataError, match=message):
        from_torch(Listed())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X, r"data is a ndarray of shape .30, 4.; labels are needed too: give data=.x, y."),
        (torch.zeros(3, 2), r"data is a Tensor of shape .3, 2.; labels are needed too"),
        (DataLoader(TensorDataset(torch.zeros(3, 2))), "data is a DataLoader; give its dataset, data=loader.dataset"),
        ([(X, Y), (X, Y)], "data is a list of 2; for one .samples, labels. pair a client, give fedstill.from_clients"),
        ([TensorDataset(torch.zeros(3, 2))], "for one dataset a client"),
        ([1, 2], "data is a list of 2; give a name or path, a fedstill.Dataset or Federation, .x, y."),
        ({"x": X, "y": Y}, "data is a dict of 2; give a name or path"),
        (None, "data is a NoneType; give a name or path"),
        (3, "data is an int; give a name"),
        (len, "data is the function len; call it, or give a name"),
        (Stream(), "an iterable one. cannot be divided"),
        ((X, Y[:3]), "x has 30 samples but y has 3"),
    ],
)
def test_other_objects_as_data_are_told_in_one_line_what_to_give(given: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        fedstill.run(data=given)
    assert "\n" not in str(caught.value)


def test_a_data_frame_is_pointed_to_from_frame() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match=r"data is a DataFrame; make a dataset .* fedstill.from_frame.df, target"):
        fedstill.run(data=pandas.DataFrame({"a": [1, 2]}))


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made


class Wide(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


@pytest.mark.slow
def test_a_class_that_needs_no_arguments_is_a_model_as_its_object_is() -> None:
    for model in (Net, Net(), lambda: Net(5)):
        assert fedstill.run(data=(X, Y), model=model, **RUN).summary["rounds"] == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wide, r"model is Wide, a class that is not instantiated, and needs width; give Wide\(…\) itself, or lambda"),
        (torch.optim.SGD, "model is the class SGD, an optimiser; model takes a network, and the settings optimizer"),
        (torch.optim.SGD(Net().parameters()), "model is a SGD, an optimiser"),
        (lambda x: Net(), "and needs x"),
        (lambda: 3, r"returns an int; it must return a torch.nn.Module"),
        (lambda: 1 / 0, "failed: ZeroDivisionError"),
        (3, "model is an int; give a name, a torch.nn.Module, a function that returns one, or file.py:function"),
        ("ml", "unknown model 'ml'; did you mean 'mlp'"),
        ("net.py", "model = 'net.py' names a file; name the function in it too: net.py:function"),
    ],
)
def test_other_objects_as_a_model_are_told_in_one_line_what_to_give(model: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        fedstill.run(data=(X, Y), model=model, **RUN)
    assert "\n" not in str(caught.value)
    assert as_model("mlp") == "mlp"


@pytest.mark.parametrize("callback", [print, int, 3])
def test_what_is_no_callback_is_told_what_one_is(callback: Any) -> None:
    with pytest.raises(SettingError, match=r"callbacks: .* is not an object of a fedstill.Callback"):
        fedstill.run(data=(X, Y), callbacks=[callback], **RUN)


def test_resume_takes_the_same_objects_and_no_names(tmp_path: Path) -> None:
    fedstill.run(data=(X, Y), model=Net, **RUN, out=tmp_path / "run")
    assert fedstill.resume(tmp_path / "run", data=(X, Y), model=Net, rounds=2).summary["rounds"] == 2
    with pytest.raises(SettingError, match="data = 'mnist': the run knows by itself"):
        fedstill.resume(tmp_path / "run", data="mnist")


MADE = """
import numpy as np
import torch
import fedstill
x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
y = (x[:, 0] > 0).astype(int)
def pair(): return x, y
def torch_pairs(): return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
def federation(): return fedstill.from_clients([(x, y), (x[:20], y[:20])], (x, y), names=["north", "south"])
def name(): return "mnist"
def number(): return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MADE)
    return path


@pytest.mark.parametrize("name", ["pair", "torch_pairs"])
def test_a_function_of_a_file_may_return_what_a_run_takes(file: Path, name: str) -> None:
    setup = prepare(resolve({"data": f"{file}:{name}", "model": "mlp", "clients": 3, "partition": "iid"}))
    assert len(setup.federation.dataset.train) == 24


@pytest.mark.slow
def test_a_function_of_a_file_may_return_a_federation_which_is_taken_as_it_is(file: Path, tmp_path: Path) -> None:
    reference, out = f"{file}:federation", tmp_path / "run"
    flags = ("--data", reference, "--model", "mlp", "--rounds", 1, "--out", out)
    answer = command("run", "fedavg", *flags)
    assert answer.code == 0, answer.err
    assert "2 clients with " in answer.out
    assert ", natural partition" in answer.out
    assert [line.split(",")[0] for line in (out / "clients.csv").read_text().splitlines()[1:3]]
    assert fedstill.resume(out, rounds=2).summary["rounds"] == 2
    assert isinstance(prepare(resolve({"data": reference, "model": "mlp"})).federation, Federation)
    shown = command("partition", "--data", reference, "--out", tmp_path / "p.png")
    assert "north" in shown.out
    assert "south" in shown.out


@pytest.mark.parametrize(
    ("name", "message"), [("name", "returns the name 'mnist'; set data to that"), ("number", "returns is an int; give")]
)
def test_a_function_that_returns_something_else_is_refused(file: Path, name: str, message: str) -> None:
    with pytest.raises(FedstillError, match=message):
        prepare(resolve({"data": f"{file}:{name}", "model": "mlp"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./dta/images", r"there is no file or folder \./dta/images, nor a folder dta"),
        ("images/train.npz", r"there is no file or folder images/train.npz, nor a folder images"),
        ("revews.csv", r"there is no file or folder revews.csv; did you mean reviews.csv\?"),
        ("revews.npz", "there is no file or folder revews.npz; did you mean reviews"),
        ("mnst", "unknown dataset, file or folder 'mnst'; did you mean 'mnist'"),
        ("readme.txt", "readme.txt: a dataset is a folder of images, an .npz file"),
    ],
)
def test_a_path_that_does_not_exist_is_never_called_an_unknown_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for there in ("reviews.csv", "readme.txt"):
        (tmp_path / there).write_text("text,label\na,b\n")
    with pytest.raises(FedstillError, match=message):
        fedstill.run(data=name, **RUN)


def test_a_frame_and_its_labels_apart_are_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1.0, 2.0] * 5, "sex": list("fm") * 5})
    found = as_data((frame, pandas.Series(["ill", "well"] * 5, name="outcome")))
    assert isinstance(found, Dataset)
    assert found.table is not None
    assert (found.classes, [column.name for column in found.table.columns]) == (("ill", "well"), ["age", "sex"])
    with pytest.raises(DataError, match="column 'sex' is both a feature and the label"):
        as_data((frame, frame["sex"]))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("np.zeros((20, 5), np.float32), np.arange(20) % 2", ("mlp", "dirichlet")),
        ("fedstill.from_arrays(np.zeros((20, 5)), np.arange(20) % 2, client=np.arange(20) // 10)", ("mlp", "natural")),
        ("np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2", ("lenet5", "dirichlet")),
    ],
)
def test_what_a_function_makes_settles_the_defaults_and_it_is_called_once(
    tmp_path: Path, returned: str, expected: tuple[str, str]
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "mine.py").write_text(
        f"import fedstill, numpy as np\ndef f():\n    open({str(calls)!r}, 'a').write('.')\n    return {returned}\n"
    )
    config = config_of("fedavg", {"data": f"{tmp_path}/mine.py:f"}, [])
    config = config.model_copy(update={"clients": min(2, config.clients)})
    assert (config.model, config.partition) == expected
    shape = prepare(config).federation.dataset.shape
    assert calls.read_text() == "."
    assert tuple(shape) == ((1, 32, 32) if config.model == "lenet5" else (5,))  # the size that the network takes
