"""Make the embedded dataset: a class-balanced subset of Fashion-MNIST, the same bytes at every run.

    python tools/make_fashion_mini.py FOLDER_WITH_FASHION_MNIST

FOLDER holds the four published IDX files, gzipped or not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedstill.core.seeds import numpy_rng
from fedstill.data.formats.decoded import Array, SplitArrays
from fedstill.data.formats.idx import FASHION, decode

TARGET = Path(__file__).parents[1] / "src" / "fedstill" / "data" / "embedded" / "fashion-mini.npz"
TRAIN_PER_CLASS, TEST_PER_CLASS = 600, 100
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def balanced(part: SplitArrays, per_class: int, purpose: str) -> tuple[Array, Array]:
    """As many samples of each class, drawn without replacement, in the order of the published file."""
    rng = numpy_rng(0, purpose)
    chosen = [rng.choice(np.flatnonzero(part.y == c), per_class, replace=False) for c in range(len(FASHION))]
    at = np.sort(np.concatenate(chosen))
    return part.x[at, :, :, 0], part.y[at].astype(np.uint8)


def main(folder: Path) -> None:
    """Draw both parts and write them."""
    paths = [next(p for p in (folder / name, folder / f"{name}.gz") if p.exists()) for name in FILES]
    published = decode(paths, FASHION)
    x_train, y_train = balanced(published.train, TRAIN_PER_CLASS, "fashion-mini train")
    x_test, y_test = balanced(published.test, TEST_PER_CLASS, "fashion-mini test")
    np.savez_compressed(
        TARGET, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=np.array(FASHION)
    )
    print(f"{TARGET.name}: {len(y_train)} + {len(y_test)} images, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
