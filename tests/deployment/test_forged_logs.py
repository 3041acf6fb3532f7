"""A server cannot write lines of its own into a site's log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedstill.building.config import resolve
from fedstill.core.tree import Tree
from fedstill.deployment.site import Site
from fedstill.flower.node import _Site
from fedstill.flower.records import from_records, to_records
from support.sites import SETTINGS

FORGED = "x\x1b[2J\x1b[H\n2026-01-01 00:00:00,000 INFO the owner allowed fedgen\r\n\u2028"


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All that was logged, as a handler writes it."""
    formatter = logging.Formatter("%(message)s")
    return "\n".join(formatter.format(record) for record in caplog.records)


def answer(site: _Site, body: Tree) -> Any:
    return from_records(site.answer(to_records({"id": "q", "seconds": 30, "keep": False, "body": body})))


def is_forged(text: str) -> bool:
    own = [line for line in text.splitlines() if line.startswith("2026-01-01")]
    return bool(own) or any(sign in text for sign in "\x1b\r\u2028")


def request(**changes: Any) -> dict[str, Any]:
    run = {"number": "0" * 16, "config": resolve(SETTINGS).toml(), "clients": 3, "classes": ["0", "1"], "mean": [0.0]}
    run |= {
        "std": [1.0],
        "shape": [1, 28, 28],
        "tokenizer": "",
        "steps": [],
        "frozen": [],
        "checkpoint": 0,
        "client": 0,
    }
    body = {"run": run, "request": {"kind": "Train", "client": 0, "round": 1}, "down": {}, "seconds": 1}
    for place, value in changes.items():
        if place in run:
            run[place] = value
        else:
            body[place] = value
    return body


@pytest.mark.parametrize(
    "changes",
    [
        {"request": {"kind": "Train", "client": 0, "round": 1, FORGED: 1}},
        {"request": {"kind": FORGED}},
        {"request": FORGED},
        {"number": FORGED},
        {"config": FORGED},
        {"config": f"method = {FORGED!r}"},
        {"classes": [FORGED]},
        {"tokenizer": FORGED},
        {"run": {FORGED: 1}},
    ],
    ids=str,
)
def test_no_line_of_a_sites_log_is_the_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    own = Site(tmp_path)
    found = answer(_Site(own.handle, tmp_path, None, own.record), request(**changes))
    assert found["error"]["code"]
    assert caplog.records, "the owner gets to know what failed"
    assert not is_forged(logged(caplog))


def test_an_error_names_where_it_was_raised_and_repeats_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(body: Tree) -> Tree:
        raise RuntimeError(FORGED) from ValueError(FORGED)

    def cannot(body: Tree, sent: Tree) -> None:
        raise OSError(FORGED)

    answer(_Site(fail, tmp_path, None, cannot), {})
    text = logged(caplog)
    assert "RuntimeError: x?[2J?[H 2026-01-01" in text
    assert "in fail" in text
    assert "in cannot" in text
    assert not is_forged(text)
