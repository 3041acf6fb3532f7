"""Examples in docstrings are blocks of code on the documentation site. See mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Puts each run of `>>>` lines, with what they print, into a fence."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", obj.docstring.value, flags=re.M)
            obj.docstring.value = text.replace("<BLANKLINE>", "")
