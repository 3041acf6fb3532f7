"""Ways to damage bytes: anywhere, or within JSON, TOML, safetensors, zip and gzip so that readers get further."""

from __future__ import annotations

import gzip
import io
import json
import random
import tomllib
import zipfile
from collections.abc import Sequence
from typing import Any

import tomli_w

NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e308,
)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    "",
    "x",
    "é\n",
    "\0",
    [],
    {},
    [[]],
    {"": {}},
    float("nan"),
    float("inf"),
)
WORDS = (
    b"\0",
    b"\xff",
    b"\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b";",
    b"\r\n",
    b"nan",
    b"1e999",
    b"-",
    b"\xef\xbb\xbf",
)


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The data with a few bytes changed, cut, repeated, put in or taken from another input."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, other = rng.randrange(len(changed) + 1), rng.randrange(len(changed) + 1)
        start = min(at, other)
        near = min(start + rng.choice((1, 2, 4, 8, 64)), len(changed))
        kind = rng.randrange(9)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            number = int(rng.choice(NUMBERS[:-4])) % 2**64
            size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            changed[start:near] = (number % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
        elif kind == 3:
            del changed[at:]
        elif kind == 4:
            del changed[start:near]
        elif kind == 5:
            changed[at:at] = changed[start:near] * rng.choice((1, 2, 50))
        elif kind == 6:
            changed[at:at] = rng.choice(WORDS)
        elif kind == 7:
            taken = rng.choice(others)
            changed[start:near] = taken[start:near]
        else:
            changed[start:near] = rng.randbytes(near - start)
    return bytes(changed)


def mutated_value(rng: random.Random, value: Any) -> Any:  # noqa: PLR0911 - each change is its own case
    """Plain data with one place changed into something else."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind, rest = rng.randrange(8), {k: v for k, v in value.items() if k != key}
        if kind == 0:
            return rest
        if kind == 1:
            return rest | {rng.choice(("", "x", f"{key}x", key[:-1])): value[key]}
        return value | {key: mutated_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at, kind = rng.randrange(len(value)), rng.randrange(6)
        middle = [] if kind == 0 else [value[at]] * 2 if kind == 1 else [mutated_value(rng, value[at])]
        return value[:at] + middle + value[at + 1 :]
    if isinstance(value, str) and value and rng.random() < 0.5:
        return mutate(rng, value.encode(), [value.encode()]).decode(errors="replace")
    if rng.random() < 0.02:
        deep: Any = []
        for _ in range(rng.choice((50, 3000))):
            deep = [deep]
        return deep
    return rng.choice(VALUES)


def as_json(rng: random.Random, data: bytes) -> bytes:
    try:
        return json.dumps(mutated_value(rng, json.loads(data))).encode()
    except RecursionError:
        return b"[" * rng.choice((1_000, 100_000))


def as_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines() or [b""]
    at = rng.randrange(len(lines))
    lines[at] = as_json(rng, lines[at])
    return b"\n".join(lines) + b"\n"


def as_toml(rng: random.Random, data: bytes) -> bytes:
    try:
        return tomli_w.dumps(mutated_value(rng, tomllib.loads(data.decode()))).encode()
    except (TypeError, ValueError, AttributeError, RecursionError):
        return data


def as_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Another header, of its right length."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    if rng.random() < 0.5 and "tree" in header.get("__metadata__", {}):
        header["__metadata__"]["tree"] = as_json(rng, header["__metadata__"]["tree"].encode()).decode()
    else:
        header = mutated_value(rng, header)
    try:
        written = json.dumps(header).encode()
    except RecursionError:
        written = b"[" * 100_000
    return len(written).to_bytes(8, "little") + written + body


def as_zip(rng: random.Random, data: bytes) -> bytes:
    """Members changed, with their right checksums."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        chosen = rng.choice(names)
        for name in names:
            content = old.read(name)
            new.writestr(name, mutate(rng, content, [content]) if name == chosen else content)
    return made.getvalue()


def as_gzip(rng: random.Random, data: bytes) -> bytes:
    content = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return gzip.compress(mutate(rng, content, [content]), 1)
