"""One file a method; `registry` finds them by name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NoReturn


class _Package(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("fedstill.methods is a package; fedstill.list_methods() lists the methods")


sys.modules[__name__].__class__ = _Package
