"""What a site tells, and what a server or another user may ask of it."""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import test_forged_logs as forged
import test_hostile_sites as hostile
import test_site_leaks as leaks
import test_site_policy as consent
import torch
from attack import Outcome, attack

import fedstill
from fedstill.core.errors import SettingError
from fedstill.core.reports import Code, Refusal
from fedstill.core.tree import Tree
from fedstill.data import cache
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.site import Site
from fedstill.flower import keys, node
from support.commandline import fedstill as command
from support.sites import Wire, served


@attack("error messages about a site's data", "a patient's line, file names and labels on the server's console")
def error_messages(folder: Path) -> Outcome:
    leaked, home = [], logging.Logger("home")  # what a site logs stays on its own machine
    for case, (make, settings) in leaks.FAILING.items():
        (folder / case).mkdir()
        with patch.object(node, "_log", home):
            nodes, out = leaks.run(folder / case / "run", make(folder / case), **settings)
        written = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
        leaked += [case] * any(leaks.MARKER.encode() in data.lower() for data in (*nodes.received, *written))
    count = len(leaks.FAILING)
    return not leaked, f"of {count} kinds of broken data {len(leaked)} tell the server more than a code"


@attack("forged log lines, an error of 1.2 MB", "written to the server's log as they came")
def forged_log_lines(folder: Path) -> Outcome:
    text = "failed\n2026-01-01 INFO all is well\x1b[2J" * 30_000
    forged = {"error": {"code": text, "step": text, "number": text}}
    result = served(hostile.Lying(folder, lambda answer: forged), folder / "run", rounds=1)
    log = hostile.log(folder / "run")
    longest = max(map(len, log.splitlines()))
    safe = result.records[0]["dropped"] == 1 and "all is well" not in log and "\x1b" not in log and longest < 500
    return safe, f"no byte of it is logged; longest line of the log: {longest} characters"


@attack("a server forges lines of a site's log", "the traceback repeated them, escapes and all")
def forged_site_log(folder: Path) -> Outcome:
    written, home, site = io.StringIO(), logging.Logger("home"), Site(folder)
    home.addHandler(logging.StreamHandler(written))
    with patch.object(node, "_log", home):
        forged.answer(node._Site(site.handle, folder, None, site.record), forged.request(request={forged.FORGED: 1}))
    text = written.getvalue()
    return bool(text) and not forged.is_forged(text), "one clean line, and where in fedstill it was raised"


def refused_with(request: Tree, folder: Path) -> Code | None:
    """The code with which a site refuses a request; None: it does not."""
    try:
        Site(folder, LocalInputs()).handle(request)
    except Refusal as error:
        return error.code
    return None


@attack("a server's `tokenizer` names a file or a model hub", "the site opened it")
def tokenizer_as_path(folder: Path) -> Outcome:
    secret, opened = folder / "secret.json", []
    secret.write_text("{}")
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and args[0] == str(secret) else None)
    text = {"data": "glosses-mini", "model": "bag", "model_options": {}}
    named = (str(secret), "bert-base-uncased", "~/.ssh/id_rsa")
    codes = [refused_with(consent.question({"tokenizer": name}, **text), folder / "site") for name in named]
    return codes == [Code.TOKENIZER_REFUSED] * 3 and not opened, f"refused (`{codes[0]}`), nothing opened"


@attack("a server names code or files of the site", "")
def files_of_the_site(folder: Path) -> Outcome:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    named = [{kind: f"{folder}/evil.py:it"} for kind in ("method", "model", "data", "proxy")]
    codes = []
    for settings in named:
        request = consent.question()
        lines = request["run"]["config"].splitlines()
        (kind, value), *_ = settings.items()
        lines = [f'{kind} = "{value}"' if line.startswith(f"{kind} =") else line for line in lines]
        request["run"]["config"] = "\n".join(lines)
        codes.append(refused_with(request, folder / "site"))
    safe = codes == [Code.FILE_NAMED] * 4 and not (folder / "ran").exists()
    return safe, f"refused (`{codes[0]}`), nothing run"


@attack("a method that sends more than weights", "run without a question")
def more_than_weights(folder: Path) -> Outcome:
    more = ("dafkd", "scaffold", "feddistill", "fedhkd", "qffl", "fedavg+ccvr")
    codes = {name: refused_with(consent.question(method=name), folder / name) for name in more}
    return set(codes.values()) == {Code.NOT_ALLOWED}, f"{', '.join(more)}: refused (`{codes['dafkd']}`)"


def modes(folder: Path) -> tuple[bool, str]:
    """Whether a folder and all below is its owner's alone, and the modes found."""
    found = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    return not any(mode & 0o077 for mode in found), ", ".join(f"{mode:04o}" for mode in sorted(found))


@attack("another user of the machine reads the decoded cache", "files 0644 in folders 0755, for ever")
def cache_of_others(folder: Path) -> Outcome:
    np.savez(folder / "mine.npz", x=np.zeros((20, 8, 8, 3), np.uint8), y=np.arange(20) % 4)
    before = os.umask(0o022)
    try:
        with patch.dict(os.environ, FEDSTILL_CACHE=str(folder / "cache")):
            fedstill.load_dataset(str(folder / "mine.npz"))
            safe, found = modes(folder / "cache")
            cleared = command("cache", "--clear").code == 0 and not cache.entries()
    finally:
        os.umask(before)
    return safe and cleared, f"modes {found}; `fedstill cache --clear` deletes it"


@attack("another user reads a site's last answer and state", "`answer.safetensors` 0644")
def answer_of_others(folder: Path) -> Outcome:
    site = folder / "site"
    handled = node._Site(lambda request: request, site, None)
    before = os.umask(0o022)
    try:
        node.private_folder(site)
        with node.owner_only():
            handled.answer(node.to_records({"id": "x", "seconds": 60.0, "keep": True, "body": {"a": torch.ones(3)}}))
    finally:
        os.umask(before)
    safe, found = modes(site)
    return safe and (site / "answer.safetensors").exists(), f"modes {found}"


@attack("another user of the server reads the run", "folders 0755")
def run_of_others(folder: Path) -> Outcome:
    before = os.umask(0o022)
    try:
        served(Wire(folder), folder / "run", rounds=1)
    finally:
        os.umask(before)
    mode = stat.S_IMODE((folder / "run").stat().st_mode)
    return mode == 0o700, f"the run directory has mode {mode:04o}"


@attack("a key that others can read", "used")
def key_of_others(folder: Path) -> Outcome:
    keys.make(folder / "keys", ["north"], ["127.0.0.1"])
    key = folder / "keys/sites/north"
    key.chmod(0o644)
    try:
        node.serve(lambda asked: asked, server="127.0.0.1:1", key=key, ca=None, directory=folder / "site")
    except SettingError as error:
        return "chmod 600" in str(error), "refused, with what to do"
    return False, "used"


@attack("code that a foreign run directory names", "run by `resume`, `samples`, `figure`")
def foreign_code(folder: Path) -> Outcome:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    (folder / "run").mkdir()
    names = {"method": f"{folder}/evil.py:Evil"}
    (folder / "run/config.toml").write_text("\n".join(f"{k} = {v!r}" for k, v in names.items()))
    (folder / "run/model.safetensors").touch()
    codes = []
    for words in (("resume",), ("samples",), ("figure", "confusion")):
        out = [] if words == ("resume",) else ["--out", str(folder / "x.png")]
        answer = command(*words, folder / "run", *out)
        codes.append(answer.code if "--trust-code" in answer.err else -1)
    return codes == [2] * 3 and not (folder / "ran").exists(), "not run: exit 2, unless asked or `--trust-code`"
