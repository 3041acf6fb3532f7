"""Images side by side."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from fedstill.report import style


def gallery(rows: dict[str, Tensor], path: Path, title: str = "") -> None:
    """Draw named groups of images, each (N, C, H, W) with values in 0..1, one group to a block of rows."""
    columns = min(16, max(len(images) for images in rows.values()))
    heights = [math.ceil(len(images) / columns) for images in rows.values()]
    figure = Figure(figsize=(0.62 * columns + 0.4, 0.62 * sum(heights) + 0.45 * len(rows) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    blocks = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for block, (name, images) in zip(blocks, rows.items(), strict=True):
        sheet = contact_sheet(images, columns)
        block.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        block.set_title(name, fontsize=9, loc="left")
        block.axis("off")
    if title:
        figure.suptitle(title, fontsize=10)
    style.save(figure, path)


def contact_sheet(images: Tensor, columns: int) -> NDArray[np.float32]:
    """One (H', W') or (H', W', 3) picture of all images, a white line between them."""
    n, channels, height, width = images.shape
    lines = math.ceil(n / columns)
    sheet = np.ones((lines * (height + 1) - 1, columns * (width + 1) - 1, channels), np.float32)
    for i, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image
    return sheet[..., 0] if channels == 1 else sheet[..., :3]
