"""What secure aggregation costs a round: seconds at a site and at the server, and bytes, beside the plain sum.

    python tools/secagg_cost.py --sites 10 --sizes 60000 1000000 10000000 --gone 0 3

Networks and training are left out: this is what comes on top of them. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fedstill.privacy import fixed_point
from fedstill.privacy.masks import Participant, neighbours, unmask


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def measure(sites: int, size: int, gone: int) -> dict[str, float]:
    """Seconds of each step, of one site or of the server, and bytes that a site sends."""
    update, names = torch.randn(size), list(range(sites))
    everyone, made = timed(lambda: {k: Participant(k, "cost") for k in names})
    keys, around = {k: each.public_keys() for k, each in everyone.items()}, neighbours(names)
    shared, sharing = timed(lambda: {k: each.share(keys) for k, each in everyone.items()})
    there = names[gone:]
    masked, masking = {}, 0.0
    for k in there:
        received = {other: shared[other][0][k] for other in names if other != k}
        masked[k], seconds = timed(lambda k=k, r=received: everyone[k].mask(r, fixed_point.to_integers(update)))
        masking += seconds
    proofs, confirming = timed(lambda: {k: everyone[k].confirm(there, names[:gone]) for k in there})
    given = {k: {other: proofs[other][k] for other in there if other != k} for k in there}
    revealed, revealing = timed(lambda: {k: everyone[k].reveal(given[k]) for k in there})
    digests = {k: digest for k, (_, digest) in shared.items()}
    total, unmasking = timed(
        lambda: unmask(
            "cost", masked.values(), there, names[:gone], keys=keys, around=around, digests=digests, revealed=revealed
        )
    )
    assert torch.equal(total, len(there) * fixed_point.to_integers(update))
    _, plain = timed(lambda: torch.stack([update] * len(there)).double().mean(0))
    small = sum(map(len, shared[there[-1]][0].values())) + sum(map(len, revealed[there[-1]].values()))
    small += sum(map(len, keys[there[-1]])) + sum(map(len, proofs[there[-1]].values()))
    return {
        "site": (made + sharing) / sites + (masking + confirming + revealing) / len(there),
        "server": unmasking,
        "plain server": plain,
        "bytes": 8 * size + small,
        "plain bytes": 4 * size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=[60_000, 1_000_000, 10_000_000], metavar="NUMBERS")
    parser.add_argument(
        "--gone", type=int, nargs="+", default=[0, 3], metavar="SITES", help="that drop out in training"
    )
    given = parser.parse_args()
    measure(given.sites, 1000, 0)  # libraries are loaded
    print("| numbers in the network | sites gone | s a site | s at the server | plain | MB a site sends | plain |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for size in given.sizes:
        for gone in given.gone:
            found = measure(given.sites, size, gone)
            print(
                f"| {size:,} | {gone} of {given.sites} | {found['site']:.3f} | {found['server']:.3f} "
                f"| {found['plain server']:.3f} | {found['bytes'] / 1e6:.2f} | {found['plain bytes'] / 1e6:.2f} |"
            )


if __name__ == "__main__":
    main()
