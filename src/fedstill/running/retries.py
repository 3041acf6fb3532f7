"""How often a round that failed is tried again, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.running.uplinks import RoundFailed

log = logging.getLogger(__name__)

_FIRST = 2.0  # seconds before a round is tried again; then twice as long each time
_LONGEST = 60.0
_LOOK = 1.0  # seconds between two looks at who is connected
_NAMED = 10  # sites whose reasons stand in the error


class Retries:
    """The attempts at one round. Those in which too few sites were connected do not count: they are waited for."""

    def __init__(self, round_: int, most: int, path: Path, report: Callable[[str], None]) -> None:
        """`most`: how often it is tried again; `report` shows the user a line."""
        self._round, self._most, self._path, self._report = round_, most, path, report
        self._failed = self._waits = 0

    def after(
        self, error: RoundFailed, names: Mapping[int, str], *, connected: bool, arrived: Callable[[], bool]
    ) -> None:
        """Wait until the round should be tried again, or give it up; `arrived`: whether somebody came meanwhile."""
        self._failed += connected
        self._waits += 1
        if self._failed > self._most:
            raise FedstillError(self._verdict(error, names)) from error
        pause = min(_LONGEST, _FIRST * 2.0 ** min(self._waits - 1, 30))
        which = f"attempt {self._failed + 1} of {self._most + 1}" if connected else "waiting for sites to connect"
        text = f"round {self._round} is tried again: {error} ({which}, in {pause:g} s)"
        log.warning("%s", text)
        self._report(text)
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK, left))
            if not connected and arrived():
                break

    def _verdict(self, error: RoundFailed, names: Mapping[int, str]) -> str:
        reasons = [f"{names.get(k, f'client {k}')}: {why[:200]}" for k, why in error.dropped.items()]
        more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
        listed = f" ({'; '.join(reasons[:_NAMED])}{more})" if reasons else ""
        return (
            f"round {self._round} failed {self._failed} times and is given up: {error}{listed}. If the model has "
            f"diverged, 'fedstill rollback {self._path} --to ROUND' goes back to an earlier checkpoint, and --to 0 to "
            "the start, where a smaller lr can be set. round_retries says how often a round is tried again"
        )
