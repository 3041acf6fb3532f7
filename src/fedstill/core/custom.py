"""Things that users bring in files of their own: `./mine.py:MyMethod`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from fedstill.core.errors import SettingError


def is_reference(name: str) -> bool:
    """Whether a name is of the form `file.py:object`.

    >>> is_reference("./mine.py:net"), is_reference("lenet5")
    (True, False)
    """
    return ".py:" in name


def load(reference: str) -> Any:
    """The object that `file.py:object` names."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise SettingError(f"{reference}: there is no file {file}")
    module_name = f"fedstill_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SettingError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise SettingError(f"{file} has no {name!r}")
    return getattr(module, name)
