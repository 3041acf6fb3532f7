"""One file a method; `registry` finds them by name. Called, `fedstill.methods()` is `fedstill.list_methods()`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *names: str, **settings: Any) -> Any:
        return sys.modules["fedstill"].list_methods(*names, **settings)


sys.modules[__name__].__class__ = _Package
