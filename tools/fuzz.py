"""Give every reader of messages and files damaged bytes, and see what it does.

    python tools/fuzz.py --seconds 600
    python tools/fuzz.py --seconds 60 --only npz,idx --seed 7

The contract: a value, or a FedstillError of one line; nothing else, in bounded time and memory. What breaks it is
printed with the seed that shows it again, and the input is kept in the folder that is named at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fuzz_changes import mutate
from fuzz_readers import Target, targets

from fedstill.core.errors import FedstillError

SECONDS = 10  # of a core's time that one input may take
MEMORY = 3 << 30  # bytes more than at the start


class Overtime(BaseException):
    """An input that takes too long."""


@dataclass
class Finding:
    """An input that broke the contract."""

    target: str
    data: bytes
    problem: str
    traceback: str = field(repr=False, default="")


def attempt(target: Target, data: bytes) -> Finding | None:
    """What is wrong with how a reader took these bytes."""
    try:
        target.read(data)
    except FedstillError as error:
        if "\n" in str(error).strip():
            return Finding(target.name, data, f"an error of several lines: {str(error)[:300]!r}")
        return None
    except Overtime:
        return Finding(target.name, data, f"more than {SECONDS} s", traceback.format_exc())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - this is what is looked for; a panic of Rust's is no Exception
        return Finding(target.name, data, f"{type(error).__name__}: {error}"[:300], traceback.format_exc())
    return None


def inputs(target: Target, seed: int) -> bytes:
    """The input of a seed: always the same."""
    rng = random.Random(f"{target.name} {seed}")
    data = rng.choice(target.samples)
    if target.reshape and rng.random() < 0.6:
        return target.reshape(rng, data)
    return rng.randbytes(rng.randrange(200)) if rng.random() < 0.02 else mutate(rng, data, target.samples)


def quiet() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="where to begin")
    parser.add_argument("--only", default="", help="names of readers, separated by commas")
    given = parser.parse_args()
    quiet()
    faulthandler.enable()  # a crash of native code ends this loop: it shows which reader it was
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))

    def late(*_: object) -> None:
        raise Overtime

    signal.signal(signal.SIGPROF, late)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    findings = Path(tempfile.mkdtemp(prefix="fuzz-findings-"))
    chosen = [t for t in targets(folder) if not given.only or t.name in given.only.split(",")]
    counts, seen = dict.fromkeys((t.name for t in chosen), 0), dict[str, Finding]()
    spent = dict.fromkeys(range(len(chosen)), 0.0)
    end, seeds = time.monotonic() + given.seconds, dict.fromkeys(spent, given.seed)
    while (began := time.monotonic()) < end:
        number = min(spent, key=lambda n: spent[n])  # each gets the same time
        target, seed = chosen[number], seeds[number]
        data = inputs(target, seed)
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            found = attempt(target, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except Overtime:  # native code hears of it only when it is done
            found = Finding(target.name, data, f"more than {SECONDS} s")
        counts[target.name] += 1
        seeds[number] += 1
        spent[number] += time.monotonic() - began
        if found:
            place = [line for line in found.traceback.splitlines() if line.strip().startswith("File")][-1:]
            key = f"{target.name}: {found.problem.split(':')[0]} {place}"
            if key not in seen:
                seen[key] = found
                (findings / f"{len(seen)}-{target.name.replace('/', '_')}").write_bytes(data)
                print(f"{target.name}, seed {seed}: {found.problem}\n{found.traceback}", flush=True)
    for name, count in counts.items():
        print(f"{count:9,}  {name}")
    print(f"{sum(counts.values()):9,}  inputs in {given.seconds:.0f} s, {len(seen)} findings, kept in {findings}")
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
