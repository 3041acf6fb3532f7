"""Things that users bring in files of their own: `./mine.py:MyMethod`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import zlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.files import home_path


def is_reference(name: str) -> bool:
    """Whether a name is of the form `file.py:object`.

    >>> is_reference("./mine.py:net"), is_reference("lenet5")
    (True, False)
    """
    return ".py:" in name


def load(reference: str) -> Any:
    """The object that `file.py:object` names."""
    file, _, name = reference.rpartition(":")
    path = home_path(file).resolve()
    if not path.is_file():
        raise SettingError(f"{reference}: there is no file {file}")
    try:
        module = _module(path, path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:
        raise SettingError(f"{file} cannot be imported: {summary(error, path)}") from error
    if not hasattr(module, name):
        raise SettingError(f"{file} has no {name!r}")
    return getattr(module, name)


def call(reference: str, *arguments: Any) -> Any:
    """What the function that `file.py:function` names gives for these arguments."""
    function = load(reference)
    if not callable(function):
        raise SettingError(f"{reference} is not a function")
    try:
        return function(*arguments)
    except FedstillError:
        raise
    except Exception as error:
        path = home_path(reference.rpartition(":")[0]).resolve()
        raise SettingError(f"{reference} failed: {summary(error, path)}") from error


def summary(error: BaseException, file: Path | None = None) -> str:
    """An error as one line, with the line of the user's file that it came through."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):
        text = f"SyntaxError: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if file is not None and Path(f.filename) == file]
    return text.splitlines()[0] + (f" (line {lines[-1]})" if lines else "")


@lru_cache(maxsize=64)
def _module(path: Path, changed_ns: int) -> ModuleType:
    """The module in a file, run once as long as the file does not change."""
    name = f"fedstill_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # what stands beside the file can be imported, as by a script
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module is none
        raise
    return module
