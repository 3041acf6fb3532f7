"""Write src/fedstill/building/keywords.py: the keywords of `fedstill.run`, from `Config` and the methods."""

from __future__ import annotations

import keyword
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedstill.building.schema import Config, meaning
from fedstill.methods import registry

PAGE = Path(__file__).parents[1] / "src/fedstill/building/keywords.py"
GIVEN = ("method", "data", "model", "models", "proxy", "metrics")  # parameters of `run`: they may be objects
HEAD = '''"""The keywords of `fedstill.run`, for editors and type checkers. tools/keywords.py writes this file."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from fedstill.building.sections import ColumnSettings, GroupSettings, RegionSettings
from fedstill.core.choices import AttackKind, BufferPolicy, Precision


class Settings(TypedDict, total=False):
    """Every setting of a run (`fedstill settings`)."""

'''
OWN = '''

class MethodSettings(TypedDict, total=False):
    """The settings of the methods (`fedstill methods NAME`). Those of a method of your own go into `hyper`."""

'''
TABLES = {
    "region": "RegionSettings",
    "group": "GroupSettings",
    "columns": "ColumnSettings",
}  # lists of tables, each typed or plain
NAMED = {"attack": "AttackKind", "buffers": "BufferPolicy", "precision": "Precision"}


def text() -> str:
    """The module."""
    hints = get_type_hints(Config)
    lines = [HEAD]
    for name, field in Config.model_fields.items():
        if name not in GIVEN:
            kind = f"list[{TABLES[name]}] | list[dict[str, Any]]" if name in TABLES else shown(hints[name])
            lines.append(entry(name, NAMED.get(name, kind), meaning(field)))
    lines.append(OWN)
    for name, (kinds, meanings) in sorted(methods_settings().items()):
        if name not in Config.model_fields:
            lines.append(entry(name, " | ".join(dict.fromkeys(kinds)), "; ".join(dict.fromkeys(meanings)) + "."))
    lines.append('\n\nclass Keywords(Settings, MethodSettings, total=False):\n    """Both."""\n')
    return "".join(lines)


def methods_settings() -> dict[str, tuple[list[str], list[str]]]:
    """Types and meanings of every setting of a method that can be a keyword."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for method in (*registry.names(), *registry.modifiers()):
        cls = registry.find_part(method)
        hints = get_type_hints(cls)
        for parameter in registry.own_settings(cls):
            if keyword.iskeyword(parameter.name) or not parameter.name.isidentifier():
                continue
            kinds, meanings = found.setdefault(parameter.name, ([], []))
            kinds.append(shown(hints[parameter.field]))
            meanings.append(f"{method}: {parameter.meaning or 'see the paper'}")
    return found


def shown(kind: Any) -> str:
    """A type as it is written."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(repr(value).replace(chr(39), chr(34)) for value in get_args(kind))}]"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def entry(name: str, kind: str, words: str) -> str:
    wrapped = textwrap.wrap(words, 108)
    quoted = '"""' + "\n    ".join(wrapped) + '"""'
    return f"    {name}: {kind}\n    {quoted}\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
