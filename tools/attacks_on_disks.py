"""Disks that lie."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import test_damage as damage
import test_hostile_sites as hostile
import test_served_disks as disks
import torch
from attack import Outcome, attack

from fedstill.core.errors import FedstillError
from fedstill.flower import node
from fedstill.running.directory import RunDirectory
from support.commandline import fedstill as command
from support.commandline import interrupted_after, model, short
from support.sites import Wire, served


@contextmanager
def damaged(folder: Path) -> Iterator[tuple[Path, Callable[[], Outcome]]]:
    """A run of which three of four rounds are done, to be damaged; then, what `fedstill resume` makes of it."""
    with interrupted_after(3):
        command("run", damage.METHOD, *short(out=folder / "run", rounds=damage.ROUNDS))
    whole = damage.run(damage.METHOD, folder / "whole", rounds=damage.ROUNDS)

    def resumed() -> Outcome:
        answer = command("resume", folder / "run")
        if answer.code:
            return damage.named(answer.err, "", folder / "run"), f"exit {answer.code}, the file is named"
        found, expected = model(folder / "run"), model(whole)
        same = all(torch.equal(found[name], expected[name]) for name in expected)
        noticed = "the checkpoint before" in hostile.log(folder / "run")
        return same, "noticed; goes on from the checkpoint before, to the same bits" if noticed else "the same bits"

    yield folder / "run", resumed


@attack("a flipped byte in a checkpoint", "resumed with exit 0 to another model")
def flipped_byte(folder: Path) -> Outcome:
    with damaged(folder) as (path, resumed):
        damage.flip(path / "checkpoints/round-000003.safetensors", 0.7)
        return resumed()


@attack("a deleted client state", "resumed with exit 0 to another model")
def deleted_state(folder: Path) -> Outcome:
    with damaged(folder) as (path, resumed):
        damage.states(path)[0].unlink()
        return resumed()


@attack("client states swapped, or replaced by older ones", "not noticed")
def swapped_states(folder: Path) -> Outcome:
    with damaged(folder / "a") as (path, resumed):
        one, two = damage.states(path)[:2]
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        swapped = resumed()
    with damaged(folder / "b") as (path, resumed):
        new = damage.states(path)[0]
        client = new.name.split(".")[0]
        old = next(p for p in sorted(new.parent.glob(f"{client}.*")) if p != new)
        shutil.copy(old, new)
        replayed = resumed()
    return swapped[0] and replayed[0], swapped[1] if swapped == replayed else f"{swapped[1]}; {replayed[1]}"


@attack("a flipped byte in a site's last answer", "repeated with another bit")
def flipped_answer(folder: Path) -> Outcome:
    request = {"id": "round 1", "seconds": 60.0, "keep": True, "body": {"model": torch.ones(50)}}
    whole, site = node.to_records(request), partial(node._Site, lambda body: body, folder, None)
    site().answer(whole)
    damage.flip(folder / "answer.safetensors", 0.9)
    answer = node.from_records(site().answer(whole))
    return torch.equal(answer["body"]["model"], torch.ones(50)), "made again, the same bits"


@attack("a deleted `metrics.jsonl`", "resumed with exit 0")
def deleted_metrics(folder: Path) -> Outcome:
    with damaged(folder) as (path, _):
        (path / "metrics.jsonl").unlink()
        answer = command("resume", path)
        return answer.code == 2 and "metrics.jsonl is" in answer.err, f"exit {answer.code}: the file is named"


@attack("a deleted `run.json` of a served run", "a new run number: sites began anew, another model")
def deleted_number(folder: Path) -> Outcome:
    served(Wire(folder), folder / "run", "scaffold", rounds=1)
    disks.lose_run(folder)
    verified = command("verify", folder / "run").code
    try:
        disks.go_on(folder)
    except FedstillError as error:
        return verified == 1 and "put it back" in str(error), "refused, with what to do; `fedstill verify` names it"
    return False, "it went on"


@attack("a site's deleted state", "it answered from none: another model")
def deleted_site_state(folder: Path) -> Outcome:
    served(Wire(folder), folder / "run", "scaffold", rounds=1)
    disks.lose_states(folder)
    disks.go_on(folder)
    left_out = [record.get("left_out") for record in RunDirectory.open(folder / "run", lock=False).records()]
    return left_out == [None, *[["north"]] * 3], "left out (`state-lost`) until it is put back, or `--recount`"


@attack("a flipped byte in a finished run's model", "not noticed")
def flipped_model(folder: Path) -> Outcome:
    whole = damage.run("fedavg", folder / "run", rounds=1)
    damage.flip(whole / "model.safetensors", 0.9)
    answer = command("verify", whole)
    return (
        answer.code == 1 and "model.safetensors" in answer.out,
        f"`fedstill verify` ends with {answer.code}, names it",
    )
