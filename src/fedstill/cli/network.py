"""What `fedstill keys`, `fedstill serve`, `fedstill region` and `fedstill join` do."""

from __future__ import annotations

import datetime
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from fedstill.building.config import Config
from fedstill.building.data import dataset_in, load_data, undivided
from fedstill.building.setup import check_clients, largest_answer
from fedstill.cli.commands import Flags, config_of, console, own_callbacks, print_results, run_in, run_name, say
from fedstill.cli.failure import TERMINATED, Terminated
from fedstill.core.errors import SettingError, unknown
from fedstill.core.owner import check_private
from fedstill.deployment.local_inputs import LocalInputs
from fedstill.deployment.policy import Policy
from fedstill.deployment.protocol import SiteLink
from fedstill.deployment.region import RegionalServer
from fedstill.deployment.server import regions_of, sites_in_order
from fedstill.deployment.server import serve as serve_sites
from fedstill.deployment.site import Site
from fedstill.deployment.site_engine import Terms
from fedstill.deployment.statistics import widest
from fedstill.privacy.signatures import Signer
from fedstill.running import files

if TYPE_CHECKING:
    from fedstill.flower.link import Certificates

_SOON = datetime.timedelta(days=14)
_INSECURE = "insecure: nothing is encrypted, and anybody on the way can read and change what is sent"
_SERVER, _SITE = "fedstill.flower.private", "fedstill.flower.fleet"  # what of Flower each needs is checked at start
_ROOM = 1 << 20  # bytes that an answer may have beside its tensors


def make_keys(directory: Path, sites: list[str], hosts: list[str]) -> None:
    _needs_flower()
    from fedstill.flower.keys import make

    make(directory, sites, hosts)
    own = f"its own {directory}/sites/NAME: carry that there, and delete it here, for nobody else may have it"
    if not sites:
        own = f"a key of its own, of which 'fedstill keys add {directory} NAME --public FILE' takes the .pub"
    say(f"the server needs {directory}; a site needs {directory}/ca.pem and {own}")


def add_key(directory: Path, site: str, public: Path | None) -> None:
    _needs_flower()
    from fedstill.flower.keys import add

    add(directory, site, public)
    own = f"it needs {directory}/ca.pem and {directory}/sites/{site}: carry that there, and delete it here; "
    own = "" if public else own
    say(f"{site} is let in, by a server that runs too; {own}a run that has begun without it stays without it")


def revoke_key(directory: Path, site: str) -> None:
    _needs_flower()
    from fedstill.flower.keys import revoke

    revoke(directory, site)
    say(f"{site} is not let in any more, nor by a server that runs; its runs go on without it")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, with everything cleaned up; a second one does not cut that short."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Terminated:
        console.print("stopped", style="bold red")
        raise SystemExit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(
    method: str, flags: Flags, assignments: list[str], *, keys: Path, host: str, port: int, out: Path | None,
    timeout: float, wait: float, needed: int, wait_after: float | None, recount: list[str], regional: bool,
    insecure: bool, callbacks: Sequence[str] = (), trackers: Sequence[str] = (),
) -> None:  # fmt: skip
    _needs_flower(_SERVER)
    public, revoked = _public_keys(keys), _revoked(keys)
    terms = _terms(public, timeout, needed, wait_after, recount)
    config = config_of(method, flags, assignments)
    config = config if regional else config.model_copy(update={"clients": len(public)})
    path = out or _unfinished_run(config, len(revoked)) or Path("runs") / f"served-{run_name(config)}"
    names = list(public)
    if regional:
        names += sorted(revoked & {table.name for table in config.each_region()})
        regions_of(config, names)
    hearing = own_callbacks(callbacks, trackers)
    _warn(insecure)
    held = undivided(config, widest(config, dataset_in(load_data(config))))
    clients = [str(k) for k in range(config.clients)] if regional else sites_in_order(path, names, revoked)
    check_clients(config, held, clients)
    limit = largest_answer(config, held)
    with (
        _terminable(),
        run_in(path, again="the same command") as display,
        _listening(keys, public, host, port, limit, insecure=insecure) as link,
    ):
        until, reported = time.monotonic() + wait, dict[str, str]()

        def pause(missing: dict[str, str]) -> bool:
            if missing != reported:
                names = ", ".join(f"{name} ({why})" if why else name for name, why in missing.items())
                say(f"waiting for {names}")
                reported.clear()
                reported.update(missing)
            time.sleep(0.5)
            return time.monotonic() < until

        result = serve_sites(
            config,
            names,
            link,
            path,
            terms=terms,
            pause=pause,
            callbacks=[display, *hearing],
            regional=regional,
            revoked=revoked,
        )
    print_results({config.method: result.summary})
    say(f"all of it: {path}")


@contextmanager
def _listening(
    keys: Path, public: dict[str, Path], host: str, port: int, most_bytes: int, *, insecure: bool
) -> Iterator[SiteLink]:
    """A connection to sites, by the certificate and the public keys in a directory."""
    from fedstill.flower.keys import public_keys as site_keys
    from fedstill.flower.link import Certificates, FlowerLink

    certificates = None if insecure else Certificates(keys / "ca.pem", keys / "server.pem", keys / "server.key")
    for path in (certificates.ca, certificates.certificate, certificates.key) if certificates else ():
        if not path.is_file():
            raise SettingError(f"{path} is missing; 'fedstill keys' makes it, and --insecure does without")
    if certificates:
        check_private(certificates.key)
    _say_dates(certificates)
    with tempfile.TemporaryDirectory(prefix="fedstill-") as scratch, FlowerLink(
        # Without a database no message stays on the disk. What must last is in the run directory.
        Path(scratch), partial(site_keys, keys), host=host, port=port, certificates=certificates,
        most_bytes=most_bytes + _ROOM, database=False,
    ) as link:  # fmt: skip
        say(f"listening on {host}:{port} for {', '.join(public)}")
        yield link


def _say_dates(certificates: Certificates | None) -> None:
    """Say in good time that a certificate will expire; an expired one is refused."""
    from fedstill.flower.keys import check_dates

    if certificates is None:
        return
    ends = {path: check_dates(path) for path in (certificates.certificate, certificates.ca)}
    path = min(ends, key=ends.__getitem__)
    left = ends[path] - datetime.datetime.now(datetime.UTC)
    if left < _SOON:
        console.print(f"the certificate {path} expires in {left.days} days; sites refuse it then", style="bold red")
    else:
        say(f"the certificates are valid until {ends[path]:%Y-%m-%d}")


def _revoked(keys: Path) -> set[str]:
    from fedstill.flower.keys import revoked

    return revoked(keys)


def _unfinished_run(config: Config, revoked: int) -> Path | None:
    """The directory of an unfinished run of before keys were revoked; its name has the number of sites."""
    for clients in range(config.clients + revoked, config.clients, -1):
        path = Path("runs") / f"served-{run_name(config.model_copy(update={'clients': clients}))}"
        if (path / files.SERVED).exists() and not (path / files.SUMMARY).exists():
            return path
    return None


def _public_keys(keys: Path) -> dict[str, Path]:
    """The sites' public keys, by name."""
    from fedstill.flower.keys import public_keys

    public = public_keys(keys)
    if not public:
        raise SettingError(f"{keys}/sites has no public keys (NAME.pub); 'fedstill keys' makes some for a trial")
    return public


def _sites_needed(needed: int, public: dict[str, Path]) -> int:
    if needed > len(public):
        raise SettingError(f"--needed {needed}: there are keys of {len(public)} sites")
    return needed or len(public)


def _terms(public: dict[str, Path], timeout: float, needed: int, wait_after: float | None, recount: list[str]) -> Terms:
    for name in recount:
        if name not in public:
            raise unknown("site", name, public)
    return Terms(timeout, _sites_needed(needed, public), wait_after, tuple(recount))


def _warn(insecure: bool) -> None:
    if insecure:
        console.print(_INSECURE, style="bold red")


def region(
    server: str, *, key: Path, ca: Path | None, keys: Path, host: str, port: int, timeout: float, needed: int,
    wait_after: float | None, recount: list[str], directory: Path | None, insecure: bool, policy: Policy, **inputs: str,
) -> None:  # fmt: skip
    _needs_flower(_SERVER, _SITE)
    public = _public_keys(keys)
    terms = _terms(public, timeout, needed, wait_after, recount)
    place = directory or Path(f"region-{key.name}")
    listen = partial(_listening, keys, public, host, port, insecure=insecure)
    with RegionalServer(
        place,
        list(public),
        listen,
        inputs=LocalInputs(**inputs),
        terms=terms,
        policy=policy,
        revoked=sorted(_revoked(keys)),
    ) as regional:
        _answer(regional, server, key, ca, place, insecure=insecure)
    _leave()


def join(
    server: str, *, key: Path, ca: Path | None, directory: Path | None, insecure: bool, policy: Policy,
    ask: Callable[[str], bool] | None, once: bool, **inputs: str,
) -> None:  # fmt: skip
    _needs_flower(_SITE)
    if not inputs["data"]:
        say("no --data: this site takes its share of what the run divides, which is for trials")
    place = directory or Path(f"site-{key.name}")
    ended = False

    def finished(text: str) -> None:
        nonlocal ended
        ended = once
        say(f"{text}; " + ("this site ends (--once)" if once else "waiting for the next run, until Ctrl-C"))

    site = Site(place, LocalInputs(**inputs), policy, ask, finished, Signer(key))
    _answer(
        site, server, key, ca, place, insecure=insecure, most_seconds=policy.most_seconds, done=lambda: ended
    )  # fmt: skip
    _leave()


def _answer(
    site: Site | RegionalServer, server: str, key: Path, ca: Path | None, place: Path, *, insecure: bool,
    most_seconds: float = math.inf, done: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Answer a server's requests until this process is stopped, or done."""
    from fedstill.flower.node import serve

    _warn(insecure)
    if ca is None and not insecure:
        raise SettingError("--ca: the certificate by which the server is known is needed, or --insecure")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    serve(
        site.handle, server=server, key=key, ca=None if insecure else ca, directory=place, record=site.record,
        most_seconds=most_seconds, done=done,
        ready=lambda: say(f"connected to {server} as {key.name}"),
    )  # fmt: skip


def _leave() -> None:
    console.file.flush()
    os._exit(0)  # Flower's threads would keep the process for seconds


def _needs_flower(*modules: str) -> None:
    """Refuse to begin without Flower, or with a version of it that lacks what these modules use."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise SettingError("this needs Flower: pip install 'fedstill[flower]'") from error
    if modules:
        from fedstill.flower.versions import check

        check("fedstill.flower.messages", *modules)
