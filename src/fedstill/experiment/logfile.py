"""log.txt: what happened when."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write the package's log to a file as well, and an error that ends the run with its traceback."""
    logger = logging.getLogger("fedstill")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    except BaseException as error:
        logger.error("stopped: %s", error or type(error).__name__, exc_info=True)
        raise
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
