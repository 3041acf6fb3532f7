"""Compare the bits of two checkouts: every method and modifier, in this process and with two workers.

    python tools/compare_checkouts.py OLD NEW [--only fedkf]

Each checkout runs the same small federation of the embedded data. The table says for each run whether the model and the
records, without what depends on the clock, have the same bits in both; the second may record more than the first.
Exit code 1: some have not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "clients": 6, "participation": 0.5, "rounds": 3, "rounds_per_episode": 1, "epochs": 1, "batch_size": 16,
    "fraction": 0.1, "alpha": 0.5, "model": "cnn", "image_size": 16, "pool": 60,
}  # fmt: skip
PROXY: dict[str, Any] = {"proxy": "pool"}
GENERATED = {"z_dim": 10, "batches": 2}
REGIONS = {"regions": 2, "clients": 8}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedavg", {}), ("fedprox", {}), ("fedgkd", {}), ("fedgkd-vote", {}), ("fedgkd-plus", {}), ("moon", {}),
    ("local", {}), ("fedproto", {}), ("fedtgp", {}), ("fml", {}), ("fedkd", {}), ("lg-fedavg", {}),
    ("feddistill", {}), ("feddistill-plus", {}), ("qffl", {}), ("fedmgda-plus", {}), ("scaffold", {}), ("fednova", {}),
    ("feddyn", {}), ("fedhkd", {}), ("fedkf", {"width": 8, "z_dim": 10}), ("feddf", PROXY | {"steps": 20}),
    ("fedbe", PROXY | {"server_epochs": 2}), ("dafkd", GENERATED), ("fedhyb", PROXY), ("fedgen", {}),
    ("fedftg", {"z_dim": 10, "iterations": 1}), ("fedmd", PROXY), ("creff", {}), ("lkd", {}), ("mtkd", {}),
    ("f2l", {"regions": 3, "clients": 9, "participation": 1.0}), ("fedavg+t1", {}), ("fedprox+t1", {}),
    ("fedavg+ccvr", {}), ("fedavg+median", {}), ("fedavg+trimmed-mean", {}), ("fedavg+norm-clip", {}),
    ("fedavg+krum", {"byzantine": 0}), ("fedavg+multi-krum", {"byzantine": 0}),
    ("fedgkd+feddf", PROXY | {"steps": 20}), ("fedhkd+dafkd", GENERATED),
    ("dafkd+fedhyb", GENERATED | {"source": "generated"}), ("scaffold", REGIONS), ("fedprox+lkd", REGIONS),
)  # fmt: skip
CLOCK = ("seconds", "eval_seconds", "client_seconds", "server_seconds")


def runs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every run by its name."""
    found = {}
    for method, settings in CASES:
        for engine in ({"engine": "inline"}, {"engine": "process", "workers": 2}):
            name = f"{method} {' '.join(f'{k}={v}' for k, v in settings.items())} {engine['engine']}".replace("  ", " ")
            found[name] = method, SMALL | settings | engine
    return found


def without_clock(value: Any) -> Any:
    """A record without what depends on the clock."""
    if isinstance(value, dict):
        return {name: without_clock(part) for name, part in value.items() if name not in CLOCK}
    return [without_clock(part) for part in value] if isinstance(value, list) else value


def digests(path: Path) -> dict[str, str]:
    """What tells the bits of a finished run."""
    records = [without_clock(json.loads(line)) for line in (path / "metrics.jsonl").read_text().splitlines()]
    model = path / "model.safetensors"
    tensors = _tensors(model) if model.is_file() else b""
    texts = {"model": tensors}
    for number, record in enumerate(records):
        texts |= {f"{number} {name}": json.dumps(value).encode() for name, value in _leaves(record)}
    return {name: hashlib.sha256(text).hexdigest()[:16] for name, text in texts.items()}


def _leaves(value: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Every number of a record, by its place: a later version may have further ones."""
    for name, part in value.items():
        if isinstance(part, dict):
            yield from _leaves(part, f"{place}{name}/")
        else:
            yield place + name, part


def _tensors(path: Path) -> bytes:
    """Names, shapes and values, but not what else the file says of itself."""
    from safetensors.numpy import load_file

    return b"".join(
        f"{name} {value.dtype} {value.shape}".encode() + value.tobytes()
        for name, value in sorted(load_file(path).items())
    )


def run_all(only: str) -> None:
    """In the checkout that Python finds: a line of JSON for each run."""
    import fedstill

    for name, (method, settings) in runs().items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                fedstill.run(method, out=Path(folder) / "run", **settings)
                found: Any = digests(Path(folder) / "run")
            except fedstill.FedstillError as error:
                found = {"error": str(error)}
        print(json.dumps([name, found]), flush=True)


def outcome(checkout: Path, only: str, out: Path | None) -> dict[str, Any]:
    """The digests of all runs of a checkout, saved in `out` if that is given."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "FEDSTILL_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", "--only", only]
    found = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            name, digest = json.loads(line)
            found[name] = digest
            print(f"{checkout}: {name}", file=sys.stderr)
    if child.returncode:
        raise SystemExit(f"{checkout}: the runs ended with exit code {child.returncode}")
    if out:
        out.write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, help="a checkout, or a .json of --save")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--save", type=Path, help="write the digests of one checkout here, instead of comparing two")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run_all(given.only)
        return
    if len(given.checkouts) != (1 if given.save else 2):
        parser.error("two checkouts are compared; with --save, one is run")
    both = [
        json.loads(path.read_text()) if path.suffix == ".json" else outcome(path.resolve(), given.only, given.save)
        for path in given.checkouts
    ]
    if given.save:
        return
    differing = 0
    for name, digest in both[1].items():
        old = both[0].get(name)
        changed = old is not None and any(old[key] != digest.get(key) for key in old)
        same = "not in the first" if old is None else "DIFFERENT" if changed else "same"
        differing += changed
        print(f"{same:10} {name} {digest.get('error', '')}")
    print(f"{len(both[1]) - differing} of {len(both[1])} runs have the same bits")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
