"""What `fedstill tune` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.analysis.comparing import own_names, slug
from fedstill.analysis.tuning import VALIDATION, layer, run_tuning, spaces_of
from fedstill.analysis.winners import BEST
from fedstill.building.config import Config, is_config_file, read_toml
from fedstill.cli.commands import Flags, config_of, console, known_to, own_callbacks, print_tables, run_name, say
from fedstill.cli.failure import Halted
from fedstill.core.choices import Format
from fedstill.core.errors import SettingError
from fedstill.core.space import parse_space
from fedstill.studies.trials import Terms


def tune(
    methods: Sequence[str],
    flags: Flags,
    assignments: list[str],
    *,
    spaces: Sequence[str],
    terms: Terms,
    test_seeds: int,
    jobs: int,
    out: Path | None,
    as_: Format,
    callbacks: Sequence[str] = (),
    trackers: Sequence[str] = (),
) -> None:
    file: dict[str, Any] = {}
    if any(map(is_config_file, methods)):
        if len(methods) > 1:
            raise SettingError("tune: name one file, or methods")
        file = read_toml(methods[0])
        methods = [str(file.get("method", "fedavg"))]
    if len(set(methods)) < len(methods):
        raise SettingError("a method is named twice")
    space = {**file.pop("space", {}), **parse_space(spaces)}
    given = {"validation": VALIDATION, **file, **flags}
    known, listed = {method: own_names(method) for method in methods}, list(methods)

    def configure(method: str, point: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
        chosen = layer(point, known[method])
        chosen["hyper"] = given.get("hyper", {}) | chosen["hyper"]
        settings = {**given, **chosen, "seed": first_seed + seed}
        return config_of(method, settings, known_to(method, listed, assignments)), {}

    first_seed = int(given.get("seed", 0))
    configs = {method: configure(method, {}, 0)[0] for method in methods}
    first = configs[methods[0]]
    folder = out or Path("runs") / ("tune-" + run_name(first).removeprefix(f"{slug(first.method)}-"))
    found_spaces = spaces_of(
        {method: method for method in methods}, space, {m: c.optimizer for m, c in configs.items()}
    )
    try:
        found = run_tuning(
            found_spaces, configure, folder, terms, test_seeds=test_seeds, callbacks=own_callbacks(callbacks, trackers),
            jobs=jobs, console=console if as_ == "table" else None,
        )  # fmt: skip
    except KeyboardInterrupt as error:
        raise Halted(error, folder, "the same command") from error
    print_tables(found.tables(), as_)
    drawn = found.plot()
    if as_ == "table":
        for picture in drawn:
            say(f"picture: {picture}")
        say(f"the best: fedstill run {folder / BEST}\nall of it: {folder}")
