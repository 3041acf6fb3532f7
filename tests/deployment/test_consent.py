"""What an owner agreed to covers that run, that method and those kinds of information; the audit log is whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fedstill.building.config import resolve
from fedstill.building.setup import Setup, prepare
from fedstill.core.reports import Code, Refusal
from fedstill.deployment.audit import AuditLog, verify
from fedstill.deployment.policy import Consent, Policy
from support.sites import SETTINGS


def setup_of(method: str) -> Setup:
    return prepare(resolve(SETTINGS | {"method": method}))


def code_of(consent: Consent, number: str, name: str, sends: str) -> Code | None:
    """Why a method called `name` that sends what another does is refused."""
    found = setup_of(sends)
    try:
        consent.check(number, name, found.method, found.task)
    except Refusal as refusal:
        return refusal.code
    return None


def answered() -> None:
    for thread in threading.enumerate():
        if thread.name == "consent":
            thread.join(60)


def test_consent_is_to_the_kinds_that_were_named() -> None:
    put: list[str] = []
    consent = Consent(Policy(), lambda text: not put.append(text))  # type: ignore[func-returns-value]
    code_of(consent, "1", "qffl", "qffl")
    answered()
    assert code_of(consent, "1", "qffl", "qffl") is None
    code_of(consent, "1", "qffl", "feddistill")
    answered()
    assert len(put) == 2


def test_a_method_that_sends_more_by_its_settings_is_not_allowed_silently() -> None:
    assert code_of(Consent(Policy()), "1", "fedavg", "qffl") is Code.NOT_ALLOWED
    assert code_of(Consent(Policy(allow=("fedavg",))), "1", "fedavg", "qffl") is None


def test_an_owner_is_asked_one_question_at_a_time() -> None:
    put, go = [], threading.Event()

    def ask(text: str) -> bool:
        put.append(text)
        return go.wait(60)

    consent = Consent(Policy(), ask)
    for number in ("1", "2", "3"):
        assert code_of(consent, number, "qffl", "qffl") is Code.CONSENT_PENDING
    go.set()
    answered()
    assert len(put) == 1


def test_a_line_of_the_audit_log_that_was_cut_short_is_an_error_and_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = AuditLog(tmp_path / "audit.jsonl"), os.write
    log.append(number=1)
    with monkeypatch.context() as full:
        full.setattr("os.write", lambda file, data: write(file, data[:9]))
        with pytest.raises(OSError, match="cut short"):
            log.append(number=2)
    log.append(number=3)
    assert verify(log.path) == 3
    assert '"number": 3' in log.path.read_text().splitlines()[2]
