"""How large a difference must be to be seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedstill.metrics.statistics import detectable


@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_a_difference_that_is_just_detectable_is_seen_in_four_cases_of_five(seeds: int) -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal(size=seeds)
    found = detectable(differences.tolist())
    draws = rng.normal(found, differences.std(ddof=1), (20_000, seeds))
    seen = stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
    assert seen.mean() == pytest.approx(0.8, abs=0.01)


def test_one_seed_says_nothing_about_what_can_be_seen() -> None:
    assert math.isnan(detectable([0.1]))
    assert detectable([0.5, 0.5, 0.5]) == 0
