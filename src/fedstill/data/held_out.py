"""The samples that are held out for validation, as index arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstill.core.arrays import IntArray


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Validation samples, into dataset.train: client k has `index[offsets[k]:offsets[k+1]]`."""

    index: IntArray
    offsets: IntArray  # (clients + 1,)
    pool_index: IntArray  # the server's

    @property
    def sizes(self) -> IntArray:
        """Validation samples of each client."""
        return np.diff(self.offsets)

    @property
    def samples(self) -> IntArray:
        """All of them: the clients', then the server's."""
        return np.concatenate([self.index, self.pool_index])

    def of(self, client: int) -> IntArray:
        """Indices of a client's validation samples."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]
