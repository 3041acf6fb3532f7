"""The modelled network of tools/scale.py, against sums that can be done by hand."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("scale", Path(__file__).parents[2] / "tools/scale.py")
assert _SPEC
assert _SPEC.loader
scale: Any = importlib.util.module_from_spec(_SPEC)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    import sys

    sys.modules["scale"] = scale  # for its dataclasses
    _SPEC.loader.exec_module(scale)  # type: ignore[union-attr]


def test_where_sites_lines_are_slow_their_number_does_not_matter() -> None:
    line = scale.Line(server_bytes=math.inf, site_bytes=10.0, latency=0.5, work=0.0)
    for sites in (1, 1000):
        assert line.seconds([100] * sites, [50] * sites, [7.0] * sites) == pytest.approx(10 + 0.5 + 7 + 5 + 0.5)


def test_where_the_servers_line_is_slow_every_site_adds_its_bytes() -> None:
    line = scale.Line(server_bytes=10.0, site_bytes=math.inf, latency=0.0, work=0.0)
    # The first has its request after 10 s; then four answers of 20 s each follow one another.
    assert line.seconds([100] * 4, [200] * 4, [0.0] * 4) == pytest.approx(10 + 4 * 20)


@pytest.mark.slow
def test_a_tree_moves_a_model_a_region_and_episode_at_the_top() -> None:
    line = scale.Line(work=60.0)
    found = scale.tree(2, 2, "cnn", "fedavg", 1, 3, line)
    model = 4 * found["parameters"]
    assert found["sites"] == 4
    assert found["modelled seconds a round"] > 60
    # Down and up in an episode of three rounds, and down once more at its end; beside it, the settings of the run.
    assert 3 * 2 * model < found["MB a round at the top"] * 3e6 * 1.05 < 3 * 2 * model + 200_000
