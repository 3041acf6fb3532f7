"""Every reader of messages and files, with inputs that it takes."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from fuzz_changes import as_gzip, as_json, as_lines, as_safetensors, as_toml, as_zip, mutate
from PIL import Image
from pyarrow import table as arrow_table
from pyarrow.parquet import write_table

from fedstill.building.config import read_toml, resolve
from fedstill.core import choices, tree
from fedstill.core.files import read_json, read_sealed_json, write_sealed_json
from fedstill.core.index import Index
from fedstill.core.store import Store
from fedstill.data import cache, from_frame, tokens
from fedstill.data.formats import arrays, cifar, heart, idx, images, leaf, mat, table, text
from fedstill.data.preprocessing import from_json
from fedstill.flower.records import from_records, to_records
from fedstill.running.directory import RunDirectory
from fedstill.studies import presets


@dataclass(frozen=True)
class Target:
    """A reader, inputs that it takes, and how else to change them than byte by byte."""

    name: str
    samples: Sequence[bytes]
    read: Callable[[bytes], object]
    reshape: Callable[[random.Random, bytes], bytes] | None = None


def targets(folder: Path) -> list[Target]:
    """Every reader, with files of its own in a folder."""
    datasets = [*_datasets(folder), *_texts_and_federations(folder)]
    return [*_messages(), *datasets, *_settings(folder), *_run_directories(folder)]


def _file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def written(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return written


def _messages() -> list[Target]:
    node = {"model": torch.arange(6.0), "state": {"n": [1, 2.5, "a"], "m": torch.ones(2, 2, dtype=torch.int64)}}
    plain, sealed = tree.encode(node), tree.seal(node, "label")
    records = json.dumps({"tree": to_records(node).config_records["tree"]["json"], "dtype": "float32", "shape": [6]})

    def of_records(data: bytes) -> object:
        """A message as a hostile site would make it: whatever fields Flower lets through."""
        text, _, raw = data.partition(b"\0\0")
        try:
            given = json.loads(text)
            array = Array(given["dtype"], tuple(given["shape"]), "numpy.ndarray", raw)
            made = RecordDict({"tensors": ArrayRecord({"model": array}), "tree": ConfigRecord({"json": given["tree"]})})
        except Exception:  # noqa: BLE001 - Flower's own refusals
            return None
        return from_records(made, most_bytes=10**6)

    def reshape(rng: random.Random, data: bytes) -> bytes:
        text, _, raw = data.partition(b"\0\0")
        return as_json(rng, text) + b"\0\0" + (mutate(rng, raw, [raw]) if rng.random() < 0.5 else raw)

    npy = io.BytesIO()
    np.save(npy, np.arange(6, dtype=np.float32))
    message = records.replace("state/m", "model").encode() + b"\0\0" + npy.getvalue()
    return [
        Target("tree", [plain, tree.encode([1, None])], tree.decode, as_safetensors),
        Target("sealed tree", [sealed], lambda data: tree.unseal(data, "label"), as_safetensors),
        Target("records", [message], of_records, reshape),
    ]


def _datasets(folder: Path) -> list[Target]:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (6, 5, 5), np.uint8), np.array([0, 1, 2, 0, 1, 2], np.uint8)

    def idx_file(values: Any) -> bytes:
        return b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()

    (folder / "labels").write_bytes(idx_file(labels))

    def of_idx(path: Path) -> object:
        return idx.decode([path, folder / "labels", path, folder / "labels"], idx.DIGITS)

    def of_idx_labels(path: Path) -> object:
        (folder / "pixels").write_bytes(idx_file(pixels))
        return idx.decode([folder / "pixels", path] * 2, idx.DIGITS)

    def npz(**given: Any) -> bytes:
        made = io.BytesIO()
        np.savez_compressed(made, **given)
        return made.getvalue()

    npzs = [
        npz(x=pixels, y=labels, client=labels),
        npz(x_train=rng.random((6, 3)), y_train=np.array(list("abcabc")), x_test=rng.random((2, 3)), y_test=["a", "b"]),
        npz(x=np.arange(12).reshape(6, 2), y=labels, classes=["a", "b", "c"]),
    ]
    import scipy.io

    matlab = [io.BytesIO(), io.BytesIO()]
    for made, compressed in zip(matlab, (False, True), strict=True):
        content = {"X": rng.integers(0, 256, (4, 4, 3, 3), np.uint8), "y": np.array([[1], [10], [2]])}
        scipy.io.savemat(made, content, do_compression=compressed)
    small = np.zeros((2, cifar.PIXELS), np.uint8)
    pickles = [
        pickle.dumps({b"data": small, b"labels": [1, 2], b"batch_label": b"x"}, protocol) for protocol in (2, 3, 5)
    ]
    kinds = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM", "TIFF")
    pictures = {kind: io.BytesIO() for kind in kinds}
    for kind, made in pictures.items():
        Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8)).save(made, kind)
    for number in range(6):
        (folder / "images" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 6)).save(folder / "images" / str(number % 2) / f"{number}.png")

    def of_images(path: Path) -> object:
        return images.decode(images.folder(folder / "images"))

    csvs = [b"text,label,client\n" + b"".join(b'"a, %d",%d,c%d\n' % (n, n % 2, n % 3) for n in range(8))]
    csvs += [b"\xef\xbb\xbfLabel,Text\r\n" + b'1,"x ""y"""\r\n2,z\r\n' * 4]
    titled = b'"1","a title","a text"\n"4","b","<b>c</b>"\n'
    trees = b"(3 (2 It) (4 (2 's) (4 good)))\n(1 bad)\n"
    made_tokenizer = tokens.trained(["a text", "another text"] * 3, choices.SMALLEST_VOCABULARY).encode()

    def of_tokenizer(data: bytes) -> object:
        path = folder / "tokenizer.json"
        path.write_bytes(data)
        return tokens.encode(tokens.read(str(path)), ["a text", ""], 8)

    def divided(read: Callable[[Path], text.Corpus]) -> Callable[[Path], object]:
        return lambda path: read(path).divided(str(path))

    entry = folder / "cache"
    entry.mkdir()
    decoded = arrays.decode({"x": pixels, "y": labels.astype(np.int64)})
    stored = cache._store(folder / "stored", decoded, "x")
    del stored
    meta = (folder / "stored" / "meta.json").read_bytes()

    lines = [f"{k},{'fm'[k % 2]},h{k % 3},{'ab'[k % 2]}" for k in range(12)]
    tables = ["\n".join(["age,sex,client,y", *lines]).encode(), "\n".join(["x;y", *["1,5;a", "?;b"] * 6]).encode()]
    values = {"age": [1.5, None] * 6, "sex": list("fm" * 6), "y": [0, 1] * 6}
    parquet = io.BytesIO()
    write_table(arrow_table(values), parquet)
    preprocessing = from_frame(values, "y").preprocessing.model_dump_json().encode()

    def of_table(path: Path) -> object:
        with warnings.catch_warnings(action="ignore"):  # of columns that may be ids
            return table.read(path, table.TableSettings("y"))

    return [
        Target("idx", [idx_file(pixels), gzip.compress(idx_file(pixels))], _file(folder / "i.idx", of_idx), as_gzip),
        Target("idx labels", [idx_file(labels)], _file(folder / "l.idx", of_idx_labels), as_gzip),
        Target("npz", npzs, _file(folder / "a.npz", arrays.read_npz), as_zip),
        Target("mat", [m.getvalue() for m in matlab], _file(folder / "a.mat", lambda p: mat.decode([p, p]))),
        Target(
            "cifar binary",
            [bytes([3]) + bytes(cifar.PIXELS)],
            _file(folder / "a.bin", lambda p: cifar.decode([p, p], cifar.CIFAR10)),
        ),
        Target("cifar pickle", pickles, _file(folder / "batch", lambda p: cifar.decode([p, p], cifar.CIFAR10))),
        *(
            Target(f"image {kind}", [made.getvalue()], _file(folder / f"{kind}.png", lambda p: images.opened(str(p))))
            for kind, made in pictures.items()
        ),
        Target("images", [pictures["PNG"].getvalue()], _file(folder / "images" / "0" / "9.png", of_images)),
        Target("csv", csvs, _file(folder / "a.csv", divided(text.read_table))),
        Target("csv.gz", [gzip.compress(csvs[0])], _file(folder / "a.csv.gz", divided(text.read_table)), as_gzip),
        Target("table", tables, _file(folder / "table.csv", of_table)),
        Target("parquet", [parquet.getvalue()], _file(folder / "table.parquet", of_table)),
        Target("preprocessing", [preprocessing], from_json, as_json),
        Target("ag news", [titled], _file(folder / "t.csv", divided(lambda p: text.ag_news([p, p])))),
        Target("sst5", [trees], _file(folder / "t.txt", divided(lambda p: text.sst5([p, p])))),
        Target("tokenizer", [made_tokenizer], of_tokenizer, as_json),
        Target("cache", [meta], _file(folder / "stored" / "meta.json", lambda p: cache._read(p.parent)), as_json),
    ]


def _texts_and_federations(folder: Path) -> list[Target]:
    def divided(path: Path) -> object:
        return text.read_table(path).divided(str(path))

    wide = "text,label\na,b\né,c\n".encode("utf-16")
    jsonl = b"".join(b'{"text": "a %d", "label": %d}\n' % (n, n % 2) for n in range(8))
    tsv = b'text\tlabel\n"a\tb"\tx\nc "d\ty\n' * 4
    user = {"x": [[0.5] * 784] * 6, "y": [1, 2, 3] * 2}
    line = {"x": ["x" * leaf.WINDOW] * 6, "y": list("abcabc")}
    leafs = [
        json.dumps({"users": ["u"], "num_samples": [6], "user_data": {"u": each}}).encode() for each in (user, line)
    ]
    patient = b"63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
    patient += b"67.0,1.0,4.0,?,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2\n"

    def of_leaf(path: Path) -> object:
        root = path.parent.parent
        (root / "test").mkdir(exist_ok=True)
        (root / "test" / "a.json").write_bytes(path.read_bytes())
        return leaf.femnist(root) if leaf.kind(root) == "images" else leaf.shakespeare(root).divided("leaf")

    return [
        Target("tsv", [tsv], _file(folder / "a.tsv", divided)),
        Target("jsonl", [jsonl], _file(folder / "a.jsonl", divided), as_lines),
        Target("csv in utf-16", [wide], _file(folder / "w.csv", divided)),
        Target("leaf", leafs, _file(folder / "leaf" / "train" / "a.json", of_leaf), as_json),
        Target("heart disease", [patient * 5], _file(folder / "h.data", lambda p: heart.read([p] * 4))),
    ]


def _settings(folder: Path) -> list[Target]:
    configs = [
        resolve({"method": "fedprox", "mu": 0.1}).toml().encode(),
        resolve({"method": "f2l", "region": [{"clients": 3, "lr": 0.1}, {"method": "fedgkd"}]}).toml().encode(),
    ]
    preset = tomli_w.dumps(presets._read("fedkf/table5")).encode()
    return [
        Target("config", configs, _file(folder / "config.toml", lambda p: resolve(read_toml(p))), as_toml),
        Target("preset", [preset], lambda data: presets.parsed("x", data.decode(errors="replace")), as_toml),
    ]


def _run_directories(folder: Path) -> list[Target]:
    path = folder / "run"
    run = RunDirectory.create(path, resolve({"method": "fedprox", "rounds": 3}))
    for round_ in (1, 2):
        run.client_store.write(5, round_, {"written": torch.ones(round_)})
        run.append({"round": round_, "accuracy": 0.5})
        run.checkpoint(round_, {"model": torch.ones(3), "state": {}}, [5])
    run.settle()
    run.write("summary.json", '{"rounds": 2}')
    run.write_digests()
    run.release()
    write_sealed_json(path / "run.json", {"number": "0" * 16, "sites": ["a", "b"]})
    originals = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}

    def whole(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        """With every other file as it was."""

        def written(data: bytes) -> object:
            for file in path.rglob("*"):
                if file.is_file() and file not in originals:
                    file.unlink()
            for file, content in originals.items():
                if not file.exists() or file.read_bytes() != content:
                    file.write_bytes(content)
            (path / name).write_bytes(data)
            return read(path)

        return written

    def restored(path: Path) -> object:
        opened = RunDirectory.open(path)
        try:
            found = opened.restore()
            if found is None or found[0] not in (1, 2) or not torch.equal(found[1]["model"], torch.ones(3)):
                raise AssertionError(f"another state was restored: {found}")
            return opened.client_store.read(5, before=3), opened.records()
        finally:
            opened.release()

    def sample(name: str) -> list[bytes]:
        return [(path / name).read_bytes()]

    def of(name: str, read: Callable[[Path], object] = restored, reshape: Any = None) -> Target:
        return Target(f"run: {name}", sample(name), whole(name, read), reshape)

    def settings(path: Path) -> object:
        return RunDirectory.open(path, lock=False).config()

    store = Store(folder / "site", run="0" * 16)
    store.write(5, 1, {"a": torch.ones(3)})
    state = store.path(5, 1)
    return [
        of("config.toml", settings, as_toml),
        of("metrics.jsonl", reshape=as_lines),
        of("metrics.jsonl", lambda path: RunDirectory.open(path, lock=False).records(), as_lines),
        of("checkpoints/index"),
        of("checkpoints/round-000002.safetensors", reshape=as_safetensors),
        of("checkpoints/clients/0/5.2.safetensors", reshape=as_safetensors),
        of("run.json", lambda path: read_sealed_json(path / "run.json"), as_json),
        of("summary.json", lambda path: read_json(path / "summary.json"), as_json),
        of("digests.json", verify, as_json),
        Target("index", sample("checkpoints/index"), _file(folder / "index", lambda p: Index(p).run())),
        Target("client state", [state.read_bytes()], _file(state, lambda _: store.latest(5)), as_safetensors),
    ]


def verify(path: Path) -> object:
    from fedstill.running.verify import verify as checked

    return checked(path)
