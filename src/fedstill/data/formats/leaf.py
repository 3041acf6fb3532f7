"""LEAF's federations as its scripts write them: JSON files of users, each with samples and labels of its own.

    {"users": ["f0001_41"], "num_samples": [2], "user_data": {"f0001_41": {"x": [..., ...], "y": [3, 12]}}}

in the folders train/ and test/. FEMNIST's samples are 784 pixels of 0 to 1, Shakespeare's 80 characters each, whose
label is the character that follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstill.core.errors import DataError, in_one_line
from fedstill.data.formats.arrays import decode as decode_arrays
from fedstill.data.formats.decoded import Array, Decoded, SourceFile, source_file
from fedstill.data.formats.idx import EMNIST_BYCLASS
from fedstill.data.formats.text import Corpus

SIDE = 28  # pixels of FEMNIST's images
WINDOW = 80  # characters before the one to predict
CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's, in its order
)
_FIRST_SAMPLE = re.compile(r'"x"\s*:\s*\[\s*(["\[])')
_LOOKED_AT = 1 << 22  # characters, in which the first sample stands
CLASSES = tuple({"\n": "newline", " ": "space"}.get(character, character) for character in CHARACTERS)


@dataclass(frozen=True)
class User:
    """One user's samples in one file."""

    name: str
    x: list[Any]
    y: list[Any]
    file: Path


def json_files(folder: Path) -> list[Path]:
    """The files of users in a folder, by name."""
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def files(root: Path) -> list[SourceFile]:
    """Every file that a federation is made from."""
    return [source_file(path) for part in ("train", "test") for path in json_files(root / part)]


def kind(root: Path) -> Literal["", "images", "text"]:
    """What a folder of LEAF's holds; empty: it is none."""
    found = [json_files(root / part) for part in ("train", "test")]
    if not all(found):
        return ""
    try:
        with open(found[0][0], encoding="utf-8", errors="replace") as file:
            first = _FIRST_SAMPLE.search(file.read(_LOOKED_AT))  # the whole may be gigabytes
    except OSError as error:
        raise DataError(f"{found[0][0]}: cannot be read ({error.strerror})") from error
    return "text" if first and first[1] == '"' else "images"


def femnist(root: Path) -> Decoded:
    """Handwritten characters, by writer: 62 classes, as EMNIST's by class."""
    arrays: dict[str, Array] = {}
    for part, suffix in (("train", ""), ("test", "_test")):
        users = list(_users(json_files(root / part)))
        pixels = [_pixels(user) for user in users]
        arrays |= {
            f"x{suffix}": np.concatenate(pixels) if pixels else np.zeros((0, SIDE, SIDE), np.uint8),
            f"y{suffix}": np.array([_class(user, label) for user in users for label in user.y], np.int64),
            f"client{suffix}": np.array([user.name for user in users for _ in user.y], str),
        }
    return decode_arrays(arrays, EMNIST_BYCLASS, str(root))


def shakespeare(root: Path) -> Corpus:
    """What characters of the plays say, by character: which letter comes after 80."""
    number = {character: place for place, character in enumerate(CHARACTERS)}
    parts = []
    for part in ("train", "test"):
        users = list(_users(json_files(root / part)))
        for user in users:
            if wrong := [x for x in user.x if not isinstance(x, str) or len(x) != WINDOW]:
                raise DataError(f"{user.file}: a sample of {user.name!r} is not {WINDOW} characters: {wrong[0]!r:.60}")
            if stray := [y for y in user.y if not isinstance(y, str) or y not in number]:
                raise DataError(f"{user.file}: label {stray[0]!r:.20} of {user.name!r} is none of LEAF's characters")
        parts.append(
            (
                [x for user in users for x in user.x],
                np.array([number[y] for user in users for y in user.y], np.int64),
                np.array([user.name for user in users for _ in user.y], str),
            )
        )
    (texts, labels, client), (test_texts, test_labels, test_client) = parts
    return Corpus(
        *(texts, labels, test_texts, test_labels, CLASSES, client, test_client), tokenizer=tokenizer(), length=WINDOW
    )


def tokenizer() -> str:
    """LEAF's characters as a tokenizer of the tokenizers library: a token each, and one for any other character."""
    vocabulary = {"[PAD]": 0} | {character: place for place, character in enumerate(CHARACTERS, 1)}
    vocabulary["[UNK]"] = len(vocabulary)
    special = [
        {"id": vocabulary[name], "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name in ("[PAD]", "[UNK]")
    ]
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": split,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        }
    )


def _users(paths: Sequence[Path]) -> Iterator[User]:
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)["user_data"]
            found = [User(str(name), list(each["x"]), list(each["y"]), path) for name, each in dict(data).items()]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path}: not a file of LEAF's, with user_data of x and y ({in_one_line(error)})"
            ) from error
        for user in found:
            if len(user.x) != len(user.y):
                raise DataError(f"{path}: user {user.name!r} has {len(user.x)} samples but {len(user.y)} labels")
            if user.y:
                yield user


def _pixels(user: User) -> Array:
    try:
        values = np.array(user.x, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{user.file}: samples of user {user.name!r} are not all numbers ({error})") from error
    if values.shape != (len(user.x), SIDE * SIDE) or not (values.min() >= 0 and values.max() <= 1):
        raise DataError(f"{user.file}: samples of user {user.name!r} are not {SIDE * SIDE} pixels of 0 to 1 each")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)


def _class(user: User, label: Any) -> int:
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(EMNIST_BYCLASS):
        raise DataError(f"{user.file}: label {label!r:.20} of user {user.name!r} is not 0 to {len(EMNIST_BYCLASS) - 1}")
    return label
