"""What one site sends costs the server no more than it is worth, whatever it is: memory, time or the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.errors import DataError
from fedstill.core.tree import Tree, decode, encode
from fedstill.deployment import audit
from fedstill.deployment.audit import RecordedLink, contents
from fedstill.deployment.protocol import failure_reason
from support.sites import Wire


class Answers(Wire):
    """Sites that answer as they are told."""

    def __init__(self, folder: Path, answers: Mapping[str, Tree]) -> None:
        super().__init__(folder)
        self.answers = answers

    def send_requests(self, requests: Mapping[str, Tree], **more: Any) -> Iterator[tuple[str, Any]]:
        yield from self.answers.items()


def out_of_memory(body: Tree) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def out_of_luck(body: Tree) -> Any:
    raise MemoryError


@pytest.mark.parametrize("failing", [out_of_memory, out_of_luck])
def test_an_answer_that_takes_all_memory_is_a_failure_of_its_site_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Callable[[Tree], Any]
) -> None:
    digest = audit.digest
    monkeypatch.setattr(audit, "digest", lambda body: failing(body) if body["samples"] == 1 else digest(body))
    link = RecordedLink(Answers(tmp_path, {"a": {"samples": 1}, "b": {"samples": 2}}), tmp_path / "received.jsonl")
    found = dict(link.send_requests({"a": {}, "b": {}}, timeout=1.0))
    assert failure_reason(found["a"]) == "its answer cannot be recorded"
    assert found["b"] == {"samples": 2}
    assert audit.verify(tmp_path / "received.jsonl") == 2


def test_a_long_name_is_not_copied_for_all_that_is_below_it() -> None:
    class Counted(str):
        copied = 0

        def __str__(self) -> str:
            return self

        def __getitem__(self, part: Any) -> str:
            found = super().__getitem__(part)
            Counted.copied += len(found)
            return found

    below = {str(i): i for i in range(1000)}
    found = contents({Counted("x" * 100_000): below}, {})
    assert Counted.copied < 1000
    assert len(found["values"]) == 100
    assert found["more"] == 900
    assert all(len(name) <= 80 for name in found["values"])


def test_tensors_beyond_those_that_are_named_are_counted() -> None:
    found = contents({"message": {str(i): torch.zeros(1) for i in range(130)}, "samples": 4}, {"0": "weights"})
    assert [len(found["parts"]), found["values"], found["more"]] == [100, ["samples"], 30]
    assert [part["kind"] for part in found["parts"][:2]] == ["weights", "other"]


def test_bytes_that_name_a_tensor_twice_are_refused() -> None:
    data = encode({"a": torch.ones(2), "b": torch.zeros(2)})
    twice = data.replace(json.dumps({"$tensor": "1"}).replace('"', '\\"').encode(), b'{\\"$tensor\\": \\"0\\"}')
    assert twice != data
    with pytest.raises(DataError, match="damaged data"):
        decode(twice)
