"""What was sent, and what was received: a line of JSON each, appended and never changed.

Each line carries the digest of the line before it, so that one that was taken out or altered later shows.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fedstill.core import tree
from fedstill.core.errors import DataError
from fedstill.core.owner import private_folder
from fedstill.core.reports import cleaned
from fedstill.core.tree import Tree
from fedstill.deployment.protocol import SiteLink

SENT = "audit.jsonl"  # in a site's folder
STATE = "state"  # there, a folder for each run
_TAIL = 1 << 20  # bytes at a file's end among which its last line is
_MOST_PARTS = 100  # of an answer; more are counted, not named
_LONGEST = 200  # characters of a place in an answer


class AuditLog:
    """A file to which lines are added. With `durable`, a line is on the disk when `append` returns."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path, self._durable = path, durable
        self._last: str | None = None  # digest of the last line

    def append(self, **fields: Any) -> None:
        if not self.path.parent.is_dir():
            private_folder(self.path.parent)
        opened = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            start = b""
            if self._last is None:
                tail = _tail(opened)
                start = b"\n" if tail and not tail.endswith(b"\n") else b""  # a kill cut the last line
                self._last = _digest(tail.rstrip(b"\n").rpartition(b"\n")[2]) if tail else ""
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": now, **fields, "previous": self._last}).encode()
            data, self._last = start + line + b"\n", None  # if it is cut short, the next line looks at what is there
            if os.write(opened, data) != len(data):
                raise OSError(errno.ENOSPC, "the line was cut short", str(self.path))
            if self._durable:
                os.fsync(opened)
            self._last = _digest(line)
        finally:
            os.close(opened)


def verify(path: Path) -> int:
    """How many lines an audit log has; DataError names the first that does not follow from the one before."""
    last = ""
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            previous = json.loads(line)["previous"]
        except (ValueError, KeyError, TypeError):
            previous = last  # cut by a kill; the next line holds the digest of what is left of it
        if previous != last:
            raise DataError(f"{path}, line {number}: it does not follow from the line before; lines were changed")
        last = _digest(line)
    return len(lines)


def _tail(opened: int) -> bytes:
    size = os.fstat(opened).st_size
    return os.pread(opened, _TAIL, max(0, size - _TAIL))


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else ""


def contents(body: Tree, kinds: Mapping[str, str]) -> dict[str, Any]:
    """What an answer consists of: its tensors by name, kind, shape and dtype, and the names of its plain values."""
    parts: list[dict[str, Any]] = []
    values: list[str] = []
    more = 0

    def walk(node: Tree, place: str) -> None:
        nonlocal more
        if isinstance(node, dict):
            for key, value in node.items():
                # A long name with many below it is not copied for each of them.
                name = str(key)[:_LONGEST]
                walk(value, f"{place}/{name}"[:_LONGEST] if place else name)
        elif len(parts if isinstance(node, Tensor) else values) == _MOST_PARTS:
            more += 1
        elif isinstance(node, Tensor):
            name = place.removeprefix("message/")
            about = {"shape": list(node.shape), "dtype": str(node.dtype).removeprefix("torch.")}
            parts.append({"name": cleaned(name, 80), "kind": kinds.get(name, "other"), **about})
        elif place:
            values.append(cleaned(place, 80))

    walk(body, "")
    return {"parts": parts, "values": values} | ({"more": more} if more else {})


def digest(body: Tree) -> dict[str, Any]:
    """Bytes and SHA-256 of an answer, the same at both ends."""
    encoded = tree.encode(body)
    return {"bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}


def request_kind(request: Tree) -> dict[str, Any]:
    """The kind of a request: `Train` in which round, or `Join` for the numbers of samples alone."""
    body = request.get("request") if isinstance(request, dict) else None
    if not isinstance(body, dict):
        return {"request": "Join"}
    number = body.get("round")
    return {"request": cleaned(body.get("kind"), 20)} | ({"round": number} if isinstance(number, int) else {})


def answer_entry(message: Tree, answer: Tree, kinds: Mapping[str, str]) -> dict[str, Any]:
    """A line of a site's audit log about an answer: the request, what it consists of, how much, and its digest."""
    run = message.get("run") if isinstance(message, dict) else None
    number = run.get("number") if isinstance(run, dict) else None
    about = {"run": cleaned(number, 16), **request_kind(message)}
    if "error" in answer:
        return {**about, "error": answer["error"]}
    return {**about, **contents(answer["body"], kinds), **digest(answer["body"])}


class RecordedLink:
    """A link whose answers are recorded as they arrive."""

    def __init__(self, link: SiteLink, path: Path) -> None:
        self._link, self._log = link, AuditLog(path, durable=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def present(self) -> set[str]:
        return self._link.present()

    def send_requests(
        self, requests: Mapping[str, Tree], *, timeout: float, name: str | None = None, **more: Any
    ) -> Iterator[tuple[str, Any]]:
        answers = self._link.send_requests(requests, timeout=timeout, name=name, **more)
        return self._record(dict(requests), answers)

    def _record(self, requests: dict[str, Tree], answers: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        try:
            for site, answer in answers:
                about, found = {"site": site, **request_kind(requests.get(site))}, dict[str, Any]()
                if isinstance(answer, dict) and "error" not in answer:
                    try:
                        found = {**contents(answer, {}), **digest(answer)}
                    except Exception:  # noqa: BLE001 - whatever it is, one site must not end the run
                        answer = SimpleNamespace(reason="its answer cannot be recorded")  # noqa: PLW2901
                if found:
                    self._log.append(**about, **found)
                else:
                    self._log.append(**about, failure=cleaned(getattr(answer, "reason", "an error")))
                yield site, answer
        finally:
            if close := getattr(answers, "close", None):
                close()
