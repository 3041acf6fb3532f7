"""`fedstill serve`, `region` and `join`. What it imports at the top is light: `--help` must answer at once."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from fedstill.cli.consent import (
    Allow,
    Deny,
    Download,
    MaxHours,
    MaxRounds,
    PolicyFile,
    ask,
    on_terminal,
    policy_of,
)
from fedstill.cli.options import CHOOSING, COLUMNS, LEARNING, Callbacks, Out, Set
from fedstill.cli.settings import Settings, with_settings
from fedstill.cli.tracking import Trackers, with_trackers

Ca = Annotated[Path | None, typer.Option(help="The certificate by which the server is known: its ca.pem.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Encrypt nothing. For trials on one machine.")]
Needed = Annotated[int, typer.Option(help=r"Sites without which it does not start. \[all]", min=0)]
WaitAfter = Annotated[
    float | None,
    typer.Option(
        help="Seconds for which a round waits on, once min_clients have answered and no other does. "
        r"\[ten times what the other sites take, at least 30]",
        min=0,
        show_default=False,
    ),
]
Recount = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SITE",
        help="A site that may hold more or less than when it joined, or lost its state; repeatable.",
    ),
]
OwnDataDir = Annotated[str, typer.Option(help=r"Where dataset files are. \[$FEDSTILL_DATA]")]
OwnMethod = Annotated[str, typer.Option(help="file.py:Class, where the run's method is no name but a file.")]
OwnTextColumn = Annotated[str, typer.Option(help=r"Column of the texts of the site's table. \[text]")]
OwnLabelColumn = Annotated[str, typer.Option(help=r"Column of their labels. \[label]")]
OwnModel = Annotated[str, typer.Option(help="file.py:function, where the run's network is no name but a file.")]
OwnPretrained = Annotated[
    str, typer.Option(help="Folder or hub name of the encoder, where the run's network begins with one.")
]


@with_settings("data", "data_dir", *COLUMNS, *LEARNING, *CHOOSING, "device", "eval_every", "metrics")
@with_trackers
def serve(
    method: Annotated[str, typer.Argument(help="A method from 'fedstill methods', or a config.toml.")],
    keys: Annotated[Path, typer.Option(help="The directory with the server's certificate and the sites' public keys.")],
    settings: Settings,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is any.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 9092,
    timeout: Annotated[float, typer.Option(help="Seconds that a site may take to answer.", min=1)] = 600.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for sites before the first round.", min=0)] = 600.0,
    needed: Needed = 0,
    wait_after: WaitAfter = None,
    recount: Recount = None,
    regional: Annotated[
        bool, typer.Option("--regional", help="The keys are those of regional servers ('fedstill region').")
    ] = False,
    insecure: Insecure = False,
    out: Out = None,
    set_: Set = None,
    callback: Callbacks = None,
    trackers: Trackers = (),
) -> None:
    """Train with sites that keep their data: the server's end. Killed, the same command goes on where it was.

    \b
    fedstill keys trial --site north --site south --host server.example
    fedstill serve fedavg --keys trial --host 0.0.0.0 --rounds 20
    """
    importlib.import_module("fedstill.cli.network").serve(
        method, settings, set_ or [], keys=keys, host=host, port=port, out=out, timeout=timeout, wait=wait,
        needed=needed, wait_after=wait_after, recount=recount or [], regional=regional, insecure=insecure,
        callbacks=callback or [], trackers=trackers,
    )  # fmt: skip


def region(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the global server listens.")],
    key: Annotated[Path, typer.Option(help="This region's private key, which the global server knows.")],
    keys: Annotated[Path, typer.Option(help="The directory with its own certificate and its sites' public keys.")],
    ca: Ca = None,
    host: Annotated[str, typer.Option(help="Address to listen on for sites; 0.0.0.0 is any.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on for sites.", min=1, max=65535)] = 9093,
    timeout: Annotated[float, typer.Option(help="Seconds that a site may take to answer.", min=1)] = 600.0,
    needed: Needed = 0,
    wait_after: WaitAfter = None,
    recount: Recount = None,
    data: Annotated[str, typer.Option(help="Where the region's method needs samples on its server: which.")] = "",
    data_dir: OwnDataDir = "",
    method: OwnMethod = "",
    model: OwnModel = "",
    pretrained: OwnPretrained = "",
    directory: Annotated[Path | None, typer.Option(help=r"What it keeps between rounds. \[region-NAME]")] = None,
    download: Download = None,
    policy: PolicyFile = None,
    insecure: Insecure = False,
) -> None:
    """Train with regions: a regional server, which runs its sites' rounds and answers the global one once an episode.

    \b
    fedstill serve f2l.toml --regional --keys world          (the global server)
    fedstill region world.example:9092 --key world/sites/east --ca world/ca.pem --keys east --host 0.0.0.0
    fedstill join east.example:9093 --key east/sites/ann --ca east/ca.pem --data ./images
    """
    importlib.import_module("fedstill.cli.network").region(
        server, key=key, ca=ca, keys=keys, host=host, port=port, timeout=timeout, needed=needed,
        wait_after=wait_after, recount=recount or [], directory=directory, insecure=insecure,
        policy=policy_of(policy, download=download),
        data=data, data_dir=data_dir, method=method, model=model, pretrained=pretrained,
    )  # fmt: skip


def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server listens.")],
    key: Annotated[Path, typer.Option(help="This site's private key, from 'fedstill keys' or ssh-keygen -t ecdsa.")],
    ca: Ca = None,
    data: Annotated[
        str,
        typer.Option(
            help=r"The site's data: a folder, an .npz, a .csv, a table or file.py:function. \[its share of the run's]"
        ),
    ] = "",
    target: Annotated[str, typer.Option(help=r"Of a table: the column with the label. \[the run's]")] = "",
    data_dir: OwnDataDir = "",
    text_column: OwnTextColumn = "",
    label_column: OwnLabelColumn = "",
    method: OwnMethod = "",
    model: OwnModel = "",
    pretrained: OwnPretrained = "",
    device: Annotated[str, typer.Option(help="Where the site trains: cpu, cuda, cuda:1 and so on, or auto.")] = "cpu",
    directory: Annotated[Path | None, typer.Option(help=r"What the site keeps between rounds. \[site-NAME]")] = None,
    insecure: Insecure = False,
    once: Annotated[bool, typer.Option("--once", help="End after one run, instead of waiting for the next.")] = False,
    allow: Allow = None,
    deny: Deny = None,
    max_rounds: MaxRounds = None,
    max_hours: MaxHours = None,
    download: Download = None,
    policy: PolicyFile = None,
) -> None:
    """Train with sites that keep their data: a site's end. Runs until it is stopped, or with --once until a run ends.

    \b
    fedstill join server.example:9092 --key trial/sites/north --ca trial/ca.pem --data ./images

    At the end of a run the final model is in the site's folder: fedstill predict site-north --data ./new-images
    What is sent is listed in the site's audit.jsonl. Methods that send more than weights need --allow METHOD; of a
    table, sums over its columns (means, spreads, categories) need --allow statistics.
    """
    agreed = policy_of(
        policy, allow=allow or [], deny=deny or [], max_rounds=max_rounds, max_hours=max_hours, download=download
    )
    importlib.import_module("fedstill.cli.network").join(
        server, key=key, ca=ca, directory=directory, insecure=insecure, policy=agreed,
        ask=ask if on_terminal() else None, once=once,
        data=data, target=target, data_dir=data_dir, method=method, model=model, pretrained=pretrained, device=device,
        text_column=text_column, label_column=label_column,
    )  # fmt: skip
