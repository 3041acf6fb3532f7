"""Validation: a share of everybody's training samples, held out so that nothing is chosen by test data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedstill.core.arrays import IntArray
from fedstill.core.seeds import numpy_rng
from fedstill.data.federation import Federation
from fedstill.data.held_out import HeldOut
from fedstill.data.partition_draws import random_share


def hold_out(federation: Federation, share: float, seed: int) -> Federation:
    """Move a random share of each client's training samples, and of the server dataset, to validation.

    A client keeps at least one sample to train on. What is held out already stays as it is.
    """
    if not share or federation.validation is not None:
        return federation
    owner = np.repeat(np.arange(federation.clients), federation.sizes)
    held = is_held_out(owner, federation.clients, share, seed)
    pool = federation.pool_index
    in_pool = random_share(np.zeros(len(pool), np.int64), 1, share, numpy_rng(seed, "validation pool"))
    return replace(
        federation,
        train_index=federation.train_index[~held],
        train_offsets=_offsets(owner[~held], federation.clients),
        pool_index=pool[~in_pool],
        validation=HeldOut(federation.train_index[held], _offsets(owner[held], federation.clients), pool[in_pool]),
    )


def is_held_out(owner: IntArray, clients: int, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which of the clients' samples are held out, by the owner of each."""
    return random_share(owner, clients, share, numpy_rng(seed, "validation"))


def _offsets(owner: IntArray, clients: int) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))]).astype(np.int64)
