"""What tests share. Tests import from here, and never from each other."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{file.stem}" for file in Path(__file__).parent.glob("[a-z]*.py")))
