"""Make the embedded texts: a class-balanced subset of WordNet's nouns, the same bytes at every run.

    python tools/make_glosses_mini.py FOLDER_WITH_DATA_NOUN

FOLDER is the `dict` of WordNet 3.1. The files are in AG News' format: class from 1, headwords, gloss.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
from pathlib import Path

from fedstill.core.seeds import numpy_rng

TARGET = Path(__file__).parents[1] / "src" / "fedstill" / "data" / "embedded"
LEXICOGRAPHER_FILES = {"05": "animal", "06": "artifact", "13": "food", "15": "location", "20": "plant"}
TRAIN_PER_CLASS, TEST_PER_CLASS = 120, 60
# What a sample in a package need not bring to anybody's mind.
LEFT_OUT = re.compile(r"offensive|slur|derogat|disparag|\bsex|genital|persecut|Jews|brothel|addict", re.IGNORECASE)
LENGTHS = range(5, 41)  # words of a gloss


def entries(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Headwords and gloss of each synset, by lexicographer file, in the order of the published file."""
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in LEXICOGRAPHER_FILES.values()}
    seen: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        fields, _, gloss = line.partition(" | ")
        parts, gloss = fields.split(), gloss.strip()
        if line.startswith(" ") or parts[1] not in LEXICOGRAPHER_FILES or "@i" in parts:
            continue  # the licence; another class; a place by name
        words = parts[4 : 4 + 2 * int(parts[3], 16) : 2]
        title = ", ".join(word.replace("_", " ") for word in words)
        if gloss in seen or len(gloss.split()) not in LENGTHS or LEFT_OUT.search(f"{title} {gloss}"):
            continue
        seen.add(gloss)
        found[LEXICOGRAPHER_FILES[parts[1]]].append((title, gloss))
    return found


def main(folder: Path) -> None:
    """Draw both parts and write them."""
    rows: dict[str, list[tuple[str, str, str]]] = {"train": [], "test": []}
    for number, (name, known) in enumerate(entries(folder / "data.noun").items(), 1):
        drawn = numpy_rng(0, f"glosses-mini {name}").permutation(len(known))[: TRAIN_PER_CLASS + TEST_PER_CLASS]
        for part, at in (("train", drawn[:TRAIN_PER_CLASS]), ("test", drawn[TRAIN_PER_CLASS:])):
            rows[part] += [(str(number), *known[i]) for i in sorted(at)]
    for part, chosen in rows.items():
        order = numpy_rng(0, f"glosses-mini {part}").permutation(len(chosen))
        text = io.StringIO(newline="")
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(chosen[i] for i in order)
        target = TARGET / f"glosses-mini-{part}.csv.gz"
        target.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
        print(f"{target.name}: {len(chosen)} glosses, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
