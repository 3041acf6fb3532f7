"""log.txt: what happened when."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class _LogFile(logging.FileHandler):
    """A log file that gives way: on a full disk the run's own error is told, not the log's."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write the package's log to a file as well, and an error that ends the run with its traceback."""
    logger = logging.getLogger("fedstill")
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    except BaseException as error:
        logger.error("stopped: %s", str(error) or type(error).__name__, exc_info=True)
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
