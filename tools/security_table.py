"""Carry out every attack that docs/security.md names, and print its table: what happened once, and what happens now.

    python tools/security_table.py > attacks.md
    python tools/security_table.py --only "a claimed sample count"

The attackers are those of the tests. Ends with 1 if an attack does not come out as it should.
"""

# ruff: noqa: E402 - the tests' folder comes first

from __future__ import annotations

import argparse
import io
import logging
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests", "tests/running", "tests/deployment", "tests/flower", "tools")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

# In the order of the table.
import attacks_on_sites  # noqa: F401, I001
import attacks_by_sites  # noqa: F401
import attacks_on_disks  # noqa: F401
import torch
from attack import ATTACKS

from fedstill.core import reports
from fedstill.running import retries


def row(name: str, before: str, now: str, held: str) -> str:
    return f"| {name} | {before or '–'} | {now} | {held} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the name of one attack")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    print(row("attack", "once", "now", "held"), "|---|---|---|---|", sep="\n", flush=True)
    for each in ATTACKS:
        if given.only and each.name != given.only:
            continue
        quiet = io.StringIO()
        with tempfile.TemporaryDirectory(prefix="attack-") as folder, patch.object(retries, "_FIRST", 0.01):
            try:
                with redirect_stdout(quiet), redirect_stderr(quiet):
                    safe, now = each.carry_out(Path(folder))
            except Exception as error:  # noqa: BLE001 - a row of its own, and the other attacks go on
                safe, now = False, f"{type(error).__name__}: {reports.cleaned(str(error))}"
        failed += not safe
        print(row(each.name, each.before, now, "yes" if safe else "**no**"), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    logging.lastResort = None
    sys.exit(main())
