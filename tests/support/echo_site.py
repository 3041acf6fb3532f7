"""A site for tests/flower/test_flower_link.py: says back what it is told, and misbehaves when asked to.

python echo_site.py SERVER KEY CA|- DIRECTORY
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedstill.core.errors import FedstillError
from fedstill.flower import messages, node
from fedstill.flower.messages import upload as send_objects
from fedstill.flower.records import to_records

directory = Path(sys.argv[4]) if len(sys.argv) > 4 else Path()
calls, withheld = 0, False
CHUNK = 1 << 16  # bytes of an array that are sent at once, instead of 5 MB


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """The request, its tensor plus one, and how often this process has worked."""
    global calls, withheld
    calls, withheld = calls + 1, "announce" in request
    (directory / "began").touch()
    time.sleep(request.get("sleep", 0))
    if "big" in request:
        return {"tensor": torch.rand(request["big"])}  # equal chunks would be sent once
    if "divide" in request:
        return {"quotient": 1 / request["divide"]}
    if "complain" in request:
        raise FedstillError(request["complain"])
    more = {"tensor": request["tensor"] + 1} if "tensor" in request else {}
    return {**request, **more, "calls": calls}


def upload(*objects: Any, **how: Any) -> None:
    """Upload an answer that was announced, unless the request was to announce it only."""
    if not withheld:
        send_objects(*objects, **how)


def forged(tree: dict[str, Any]) -> RecordDict:
    """Records as they should be, unless an array that lies about its size was asked for."""
    body = tree.get("body")
    if not isinstance(body, dict) or "forge" not in body:
        return to_records(tree)
    array = Array(dtype="float32", shape=(1 << 40,), stype="numpy.ndarray", data=b"\x93NUMPY")
    return RecordDict({"tensors": ArrayRecord({"body": array}), "tree": ConfigRecord({"json": '{"$tensor": "body"}'})})


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    try:
        with (
            patch.object(node, "to_records", forged),
            patch("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", CHUNK),
            patch.object(messages, "upload", upload),
        ):
            node.serve(
                handle,
                server=sys.argv[1],
                key=Path(sys.argv[2]),
                ca=None if sys.argv[3] == "-" else Path(sys.argv[3]),
                directory=directory,
            )
        status = 0
    except FedstillError as error:
        print(error, file=sys.stderr, flush=True)
        status = 1
    os._exit(status)  # without the second that it takes to take PyTorch down
