"""Which model `fedstill.load` gives, what it takes, and what it says when there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import fedstill
from fedstill.core.errors import DataError, SettingError
from fedstill.core.files import write_json
from fedstill.running.verify import verify
from support.quick import QUICK, TINY

DATA = fedstill.load_dataset("fashion-mini")
IMAGES, LABELS = DATA.test.x.numpy(), np.array(DATA.classes)[DATA.test.y.numpy()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    fedstill.run("fedavg", **TINY, out=path)
    return path


def share_right(predictor: Any) -> float:
    return float((predictor.predict(IMAGES) == LABELS).mean())


def test_a_result_and_its_directory_and_its_file_alone_predict_the_same(tmp_path: Path) -> None:
    result = fedstill.run("moon", **TINY, out=tmp_path / "run")
    shutil.copy(tmp_path / "run" / "model.safetensors", tmp_path / "shared.safetensors")
    expected = result.predict_proba(IMAGES)
    for place in (tmp_path / "run", tmp_path / "shared.safetensors"):
        np.testing.assert_allclose(fedstill.load(place).predict_proba(IMAGES), expected, atol=1e-6)
    assert share_right(result) == pytest.approx(result.records[-1]["accuracy"])


def test_images_of_any_form_are_the_same_images(finished: Path, tmp_path: Path) -> None:
    predictor = fedstill.load(finished)
    x = IMAGES[:3]
    expected = predictor.predict_proba(x)
    for i, image in enumerate(x):
        Image.fromarray(image[0]).save(tmp_path / f"{i}.png")
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for same in (x[:, 0], x.transpose(0, 2, 3, 1), torch.from_numpy(x), x.repeat(3, axis=1)):
        np.testing.assert_allclose(predictor.predict_proba(same), expected, atol=1e-6)
    np.testing.assert_allclose(predictor.predict_proba(x / 255), expected, atol=0.02)  # resized without rounding
    read = predictor.predict_proba(files)  # resized by Pillow
    np.testing.assert_allclose(read, expected, atol=0.1)
    np.testing.assert_array_equal(read, predictor.predict_proba([Image.open(file) for file in files]))
    assert predictor.predict(files[0]).shape == (1,)
    assert predictor.predict(x[:0]).shape == (0,)


def test_the_module_is_plain_and_gives_the_logits_of_encoded_inputs(finished: Path) -> None:
    predictor = fedstill.load(finished)
    assert isinstance(predictor.module, torch.nn.Module)
    assert not predictor.module.training
    with torch.no_grad():
        logits = predictor.module(predictor.encode(IMAGES[:5]))
    np.testing.assert_allclose(logits.softmax(1).numpy(), predictor.predict_proba(IMAGES[:5]), atol=1e-6)
    assert repr(predictor) == "<Predictor: mlp by fedavg; image 1x16x16 -> 10 classes>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "main", "other"),
    [
        ("fedavg+t1", {}, "with T1", "without T1"),
        ("fedkf", QUICK["fedkf"], "OCA", "ACA"),
        ("f2l", {"pool": 0.2, "regions": 2, "participation": 1.0}, "model", None),
    ],
)
def test_every_model_that_was_evaluated_can_be_had_by_name(
    tmp_path: Path, method: str, settings: dict[str, Any], main: str, other: str | None
) -> None:
    result = fedstill.run(method, **TINY | settings, out=tmp_path / "run")
    last = result.records[-1]
    first = fedstill.load(tmp_path / "run")
    assert first.description.model == main
    assert share_right(first) == pytest.approx(last["accuracy"])
    if other:
        found = share_right(fedstill.load(tmp_path / "run", which=other))
        assert found == pytest.approx(last["also"][other]["accuracy"])
    with pytest.raises(SettingError, match="unknown model 'the best'"):
        fedstill.load(tmp_path / "run", which="the best")


def test_ccvr_gives_the_model_after_the_final_exchange(tmp_path: Path) -> None:
    result = fedstill.run("fedavg+ccvr", **TINY, out=tmp_path / "run")
    after = result.summary["also"]["after the last exchange"]["final_accuracy"]
    assert share_right(fedstill.load(tmp_path / "run")) == pytest.approx(after)
    assert share_right(fedstill.load(tmp_path / "run", which="without CCVR")) == pytest.approx(
        result.records[-1]["accuracy"]
    )


def test_without_a_global_model_each_client_has_its_own(tmp_path: Path) -> None:
    result = fedstill.run("feddistill", **TINY | {"participation": 1.0}, out=tmp_path / "run")
    found = [share_right(fedstill.load(tmp_path / "run", client=k)) for k in range(TINY["clients"])]
    assert np.mean(found) == pytest.approx(result.records[-1]["accuracy"])  # the mean over the active clients' models
    assert share_right(fedstill.load(tmp_path / "run", client="1")) == found[1]
    with pytest.raises(SettingError, match=r"feddistill has no global model, every client keeps its own; .*client=0"):
        fedstill.load(tmp_path / "run")
    with pytest.raises(SettingError, match="no global model"):
        result.predict(IMAGES)
    with pytest.raises(SettingError, match="clients are 0 to 5"):
        fedstill.load(tmp_path / "run", client=6)


@pytest.mark.slow
def test_statistics_that_stay_with_clients_make_models_of_their_own(tmp_path: Path) -> None:
    settings = TINY | {"model": "resnet8", "model_options": {"norm": "batch"}, "buffers": "local", "rounds": 1}
    result = fedstill.run("fedavg", **settings | {"participation": 1.0}, out=tmp_path / "run")
    shared, own = fedstill.load(tmp_path / "run"), fedstill.load(tmp_path / "run", client=0)
    assert share_right(shared) == pytest.approx(result.records[-1]["accuracy"])
    weights, mine = dict(shared.module.named_parameters()), dict(own.module.named_parameters())
    assert all(torch.equal(weights[name], mine[name]) for name in weights)
    assert not dict(shared.module.named_buffers())
    assert dict(own.module.named_buffers())


def test_a_client_that_keeps_nothing_is_said_to(finished: Path) -> None:
    with pytest.raises(SettingError, match=r"with fedavg client 0 keeps no model of its own.*there is 'model'"):
        fedstill.load(finished, client=0)


def test_what_is_no_trained_model_is_said_to_be_what_it_is(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"mnist is a dataset: fedstill.load_dataset\('mnist'\)"):
        fedstill.load("mnist")
    with pytest.raises(SettingError, match="there is no run directory or model file nowhere"):
        fedstill.load("nowhere")
    with pytest.raises(SettingError, match="not a run directory"):
        fedstill.load(tmp_path)
    (tmp_path / "x.npz").touch()
    with pytest.raises(SettingError, match=r"fedstill.load_dataset"):
        fedstill.load(tmp_path / "x.npz")
    save_file(load_file(finished / "model.safetensors"), tmp_path / "bare.safetensors")
    with pytest.raises(DataError, match="an earlier version's"):
        fedstill.load(tmp_path / "bare.safetensors")


def test_a_directory_of_an_earlier_version_gets_its_description_by_resume(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    expected = fedstill.load(tmp_path / "run").predict_proba(IMAGES[:9])
    (tmp_path / "run" / "model.json").unlink()
    with pytest.raises(SettingError, match=r"made by an earlier version; 'fedstill resume .*' writes it"):
        fedstill.load(tmp_path / "run")
    fedstill.resume(tmp_path / "run")
    np.testing.assert_array_equal(fedstill.load(tmp_path / "run").predict_proba(IMAGES[:9]), expected)


def test_a_changed_description_is_noticed(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / "model.json"
    write_json(file, json.loads(file.read_text()) | {"classes": list(reversed(DATA.classes))})
    with pytest.raises(DataError, match="digest does not fit"):
        fedstill.load(tmp_path / "run")
    assert [check.what for check in verify(tmp_path / "run") if not check.sound] == ["model.json, as the run wrote it"]


@pytest.mark.parametrize("text", ["", "[]", '{"classes": ["a"]}', '{"format": 2}'])
def test_what_describes_no_model_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(DataError, match=r"model.json: this describes no model: [^\n]*$"):
        fedstill.load(tmp_path)


def test_weights_of_another_network_are_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "digests.json").unlink()
    save_file({"other": torch.zeros(2)}, tmp_path / "run" / "model.safetensors")
    with pytest.raises(DataError, match="is not of this network"):
        fedstill.load(tmp_path / "run")


def test_code_that_a_directory_names_is_run_only_if_it_is_what_the_run_began_with(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    code = "import torch\ndef net(s, c):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, c))\n"
    file.write_text(code)
    settings = TINY | {"model": f"{file}:net", "model_options": {}, "rounds": 1}
    fedstill.run("fedavg", **settings, out=tmp_path / "run")
    assert fedstill.load(tmp_path / "run").classes == DATA.classes
    with pytest.raises(SettingError, match=r"needs code, .*not run for a file alone; give it: model="):
        fedstill.load(tmp_path / "run" / "model.safetensors")
    file.write_text(f"{code}open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(SettingError, match=r"names code that would be run.*has changed.*give it to load: model="):
        fedstill.load(tmp_path / "run")
    assert not (tmp_path / "ran").exists()
    fedstill.load(tmp_path / "run", model=f"{file}:net")
    assert (tmp_path / "ran").exists()
