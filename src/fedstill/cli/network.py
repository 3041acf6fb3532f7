"""What `fedstill keys`, `fedstill serve` and `fedstill join` do."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

from fedstill.cli.commands import Flags, config_of, console, results_table, run_in, run_name, say
from fedstill.core.errors import SettingError
from fedstill.experiment.setup import largest_answer
from fedstill.experiment.sites import Own, Site, Terms
from fedstill.experiment.sites import serve as serve_sites

_INSECURE = "insecure: nothing is encrypted, and anybody on the way can read and change what is sent"
_ROOM = 1 << 20  # bytes that an answer may have beside its tensors


def keys(directory: Path, sites: list[str], hosts: list[str]) -> None:
    _needs_flower()
    from fedstill.flower.keys import make

    make(directory, sites, hosts)
    say(
        f"the server needs {directory}; a site needs {directory}/ca.pem and its own {directory}/sites/NAME, "
        "and nobody else may have that"
    )


def serve(
    method: str, flags: Flags, assignments: list[str], *, keys: Path, host: str, port: int, out: Path | None,
    timeout: float, wait: float, needed: int, insecure: bool,
) -> None:  # fmt: skip
    _needs_flower()
    from fedstill.flower.link import Certificates, Link

    public = {path.stem: path for path in sorted((keys / "sites").glob("*.pub"))}
    if not public:
        raise SettingError(f"{keys}/sites has no public keys (NAME.pub); 'fedstill keys' makes some for a trial")
    needed = needed or len(public)
    if needed > len(public):
        raise SettingError(f"--needed {needed}: there are keys of {len(public)} sites")
    config = config_of(method, {**flags, "clients": len(public)}, assignments)
    path = out or Path("runs") / f"served-{run_name(config)}"
    certificates = None if insecure else Certificates(keys / "ca.pem", keys / "server.pem", keys / "server.key")
    if insecure:
        console.print(_INSECURE, style="bold red")
    limit = largest_answer(config) + _ROOM
    with run_in(path) as display, tempfile.TemporaryDirectory(prefix="fedstill-") as scratch, Link(
        # Without a database no message stays on the disk. What must last is in the run directory.
        Path(scratch), public, host=host, port=port, certificates=certificates, most_bytes=limit, database=False
    ) as link:  # fmt: skip
        say(f"listening on {host}:{port} for {', '.join(public)}")
        until = time.monotonic() + wait

        def pause() -> bool:
            time.sleep(0.5)
            return time.monotonic() < until

        terms = Terms(timeout=timeout, needed=needed)
        result = serve_sites(config, list(public), link, path, terms=terms, pause=pause, listener=display)
    console.print(results_table({config.method: result.summary}))
    say(f"all of it: {path}")


def join(server: str, *, key: Path, ca: Path | None, directory: Path | None, insecure: bool, **own: str) -> None:
    _needs_flower()
    from fedstill.flower.node import serve

    if insecure:
        console.print(_INSECURE, style="bold red")
    elif ca is None:
        raise SettingError("--ca: the certificate by which the server is known is needed, or --insecure")
    if not own["data"]:
        say("no --data: this site takes its share of what the run divides, which is for trials")
    place = directory or Path(f"site-{key.name}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    serve(
        Site(place, Own(**own)).handle, server=server, key=key, ca=None if insecure else ca,
        directory=place, ready=lambda: say(f"connected to {server} as {key.name}"),
    )  # fmt: skip
    console.file.flush()
    os._exit(0)  # Flower's threads would keep the process for seconds


def _needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise SettingError("this needs Flower: pip install 'fedstill[flower]'") from error
