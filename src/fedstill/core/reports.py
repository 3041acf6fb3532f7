"""What a site reports when it fails: a code, the step and a number to quote, out of fixed lists.

An error's text may hold a line of somebody's data, a file's name or a label. So the text stays in the site's own log,
and the server makes its sentence itself from the code.
"""

from __future__ import annotations

import re
import secrets
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from fedstill.core.errors import DataError, SettingError


class Code(StrEnum):
    """What went wrong, in kinds that tell nothing of the data."""

    DATA_UNREADABLE = "data-unreadable"
    DATA_MISFIT = "data-misfit"
    SETTING_REFUSED = "setting-refused"
    FILE_NAMED = "file-named"
    TOKENIZER_REFUSED = "tokenizer-refused"
    LIMIT_EXCEEDED = "limit-exceeded"
    NOT_ALLOWED = "not-allowed"
    CONSENT_PENDING = "consent-pending"
    ANSWER_UNDECLARED = "answer-undeclared"
    OUT_OF_TIME = "out-of-time"
    OUT_OF_MEMORY = "out-of-memory"
    DISK = "disk"
    STATE_LOST = "state-lost"
    BAD_REQUEST = "bad-request"
    TOO_FEW_SITES = "too-few-sites"
    SITES_MISCOUNTED = "sites-miscounted"
    MASKING_REFUSED = "masking-refused"
    FAILED = "failed"


class Step(StrEnum):
    """What the site was doing."""

    REQUEST = "request"
    CONSENT = "consent"
    SETTINGS = "settings"
    LOAD = "load"
    PREPARE = "prepare"
    TRAIN = "train"
    FINAL = "final"
    SCORE = "score"
    EPISODE = "episode"
    MASK = "mask"
    SEND = "send"


SENTENCES = {
    Code.DATA_UNREADABLE: "its data could not be read",
    Code.DATA_MISFIT: "its data do not fit the run: their shape or their classes",
    Code.SETTING_REFUSED: "it cannot work with a setting of the run",
    Code.FILE_NAMED: "the run names a file or a download, which a site never opens; it has to be given one of its own",
    Code.TOKENIZER_REFUSED: "the tokenizer that it was sent is not one, or too large",
    Code.LIMIT_EXCEEDED: "the run asks for more than the site's limits allow",
    Code.NOT_ALLOWED: "its policy does not allow this method, or a kind of information that it sends",
    Code.CONSENT_PENDING: "its owner has been asked whether to take part, and has not answered yet",
    Code.ANSWER_UNDECLARED: "its answer was not what the method declares, and was not sent",
    Code.OUT_OF_TIME: "it was not done in time",
    Code.OUT_OF_MEMORY: "it has not enough memory",
    Code.DISK: "its disk could not be read or written",
    Code.STATE_LOST: "what it kept of its earlier rounds is missing there; --recount of the server lets it begin anew",
    Code.BAD_REQUEST: "it did not understand the request",
    Code.TOO_FEW_SITES: "too few of its own sites took part",
    Code.SITES_MISCOUNTED: "it has keys of another number of sites than its region has clients in the settings",
    Code.MASKING_REFUSED: "it does not take part in this sum of masked updates: too few sites are in it, or it was "
    "started again since the sum began",
    Code.FAILED: "its work failed",
}
_NUMBER = re.compile("[0-9a-f]{4}")


class Refusal(SettingError):
    """An error with a code of its own; its text is for the site's log alone."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def during(step: Step) -> Iterator[None]:
    """Remember, of whatever is raised inside, at which step it was; the innermost step counts."""
    try:
        yield
    except BaseException as error:
        if step_of(error) is None:
            error.__dict__["fedstill_step"] = step
        raise


def step_of(error: BaseException) -> Step | None:
    found = error.__dict__.get("fedstill_step")
    return found if isinstance(found, Step) else None


def code_of(error: BaseException) -> Code:
    """The code that an error is reported by; nothing of its text or its class's name is."""
    if isinstance(error, Refusal):
        return error.code
    step = step_of(error)
    at_request = step is Step.REQUEST
    codes: dict[type[BaseException], Code] = {
        DataError: Code.DATA_UNREADABLE if step is Step.LOAD else Code.DATA_MISFIT,
        SettingError: Code.SETTING_REFUSED,
        MemoryError: Code.OUT_OF_MEMORY,
        OSError: Code.DATA_UNREADABLE if step is Step.LOAD else Code.DISK,
        **dict.fromkeys((LookupError, TypeError, ValueError), Code.BAD_REQUEST if at_request else Code.FAILED),
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), Code.FAILED)


def new_number() -> str:
    """A number to quote; drawn, for one made from the text would tell whether two texts are the same."""
    return secrets.token_hex(2)


def report(code: Code, step: Step | None, number: str) -> dict[str, str]:
    """What is sent."""
    return {"code": code.value, "step": (step or Step.REQUEST).value, "number": number}


def sentence(received: Any) -> str:
    """What a server says of a report; whatever is not one is not repeated.

    >>> sentence({"code": "data-unreadable", "step": "load", "number": "4f2a"})
    "its data could not be read (code data-unreadable, step load, number 4f2a; details are in the site's own log)"
    >>> sentence({"code": "data-unreadable", "step": "load", "number": "a patient's name"})
    'it failed, and its report is not one of the known codes'
    """
    if isinstance(received, dict) and received.keys() == {"code", "step", "number"}:
        code, step, number = received["code"], received["step"], received["number"]
        complete = isinstance(code, str) and isinstance(step, str) and isinstance(number, str)
        if complete and code in list(Code) and step in list(Step) and _NUMBER.fullmatch(number):
            details = f"code {code}, step {step}, number {number}"
            return f"{SENTENCES[Code(code)]} ({details}; details are in the site's own log)"
    return "it failed, and its report is not one of the known codes"


def frames(error: BaseException) -> str:
    """Where an error was raised, line by line, without its own words, which may be somebody else's."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__))).rstrip()


def cleaned(text: object, most: int = 200) -> str:
    r"""A text from elsewhere as one short line of printable characters, fit for a log or a console.

    >>> cleaned("two\nlines and \x1b[31mcolour")
    'two lines and ?[31mcolour'
    """
    cut = str(text)[: 4 * most]  # a megabyte is not looked through
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in cut).split())
    return line if len(line) <= most else line[: most - 1] + "…"
