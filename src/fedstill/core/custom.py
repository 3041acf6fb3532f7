"""Things that users bring: in files of their own, `./mine.py:MyMethod`, or in packages, by entry points."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import traceback
import zlib
from functools import cache, lru_cache
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


def parts(name: str) -> list[str]:
    """`a+./b.py:C+d` as its parts; a `+` in the path of a file does not count.

    >>> parts("fedgkd+./mine.py:MyServer+t1")
    ['fedgkd', './mine.py:MyServer', 't1']
    >>> parts("./a+b/mine.py:Mine+t1")
    ['./a+b/mine.py:Mine', 't1']
    """
    found: list[str] = []
    for word in name.split("+"):
        found.append(word)
        if not is_reference(word):
            continue
        for first in range(len(found) - 1):
            whole = "+".join(found[first:])
            begun = re.search(r"[/~.]", found[first]) and not is_reference(found[first])
            if begun or _file(whole).is_file():
                found[first:] = [whole]
                break
    return found


def anchored(name: str) -> str:
    """The same with the whole path of every file."""
    return "+".join(f"{_file(part)}:{part.rpartition(':')[2]}" if is_reference(part) else part for part in parts(name))


def files(name: str) -> list[Path]:
    """The files that a name refers to."""
    return [_file(part) for part in parts(name) if is_reference(part)]


def _file(reference: str) -> Path:
    return home_path(reference.rpartition(":")[0]).resolve()


@cache
def installed(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """What packages register as `fedstill.methods`, `fedstill.models` or `fedstill.datasets`, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=f"fedstill.{kind}")}


def is_own(name: str, kind: str) -> bool:
    """Whether a name is of a file of the user's, or of something that a package registers."""
    return is_reference(name) or name in installed(kind)


def _registered(kind: str, name: str) -> Any:
    point = installed(kind)[name]
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else "a package"
        raise SettingError(
            f"{name}, which {package} registers as {point.value}, cannot be loaded: {summary(error)}"
        ) from error


def load(reference: str, kind: str = "") -> Any:
    """The object that `file.py:object` names, or that a package registers under a name of this kind."""
    if kind and not is_reference(reference):
        return _registered(kind, reference)
    file, _, name = reference.rpartition(":")
    path = home_path(file).resolve()
    if not path.is_file():
        raise SettingError(f"{reference}: there is no file {file}")
    try:
        module = _module(path, path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:
        raise SettingError(f"{file} cannot be imported: {summary(error, path)}") from error
    if not hasattr(module, name):
        own = [word for word, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise SettingError(f"{file} has no {name!r}; it has {', '.join(own) or 'nothing of its own'}")
    return getattr(module, name)


def call(reference: str, *arguments: Any, kind: str = "") -> Any:
    """What the function that `file.py:function` names, or that a package registers, gives for these arguments."""
    function = load(reference, kind)
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
