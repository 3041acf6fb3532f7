"""Runs on a Ray cluster: the same bits as in one process, whoever dies, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedstill
from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.errors import FedstillError, SettingError
from fedstill.core.store import Store
from fedstill.core.tree import Message
from fedstill.data.dataset import Split
from fedstill.engine import ray_cluster, ray_connection
from fedstill.engine.worker import Train, Worker
from fedstill.running.api import configure
from fedstill.studies import cluster as studies_on_cluster
from fedstill.studies.cells import Cell, Watcher, run_cells
from fedstill.studies.tuning import TrialRun
from support.engines import Remembering, Suicidal, all_client_states, command, environment, rounds_written
from support.guards import start
from support.runs import SMALL, RunSmall, numbers, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.servers,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node with two cores, to which all runs of this process are connected, and whose workers they share.

    A worker that starts imports PyTorch, which takes longer than these runs.
    """
    ray = ray_connection.load("a cluster")
    from ray.cluster_utils import Cluster

    with (
        pytest.MonkeyPatch.context() as patch,
        ray_connection._silent(),
        tempfile.TemporaryDirectory(prefix="fs-", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # of a short name: there are sockets in it
        head = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", cluster.address)
        patch.setattr(ray_cluster, "_remote", lambda gpus: idle)
        patch.setattr(ray_cluster.RayCluster, "close", lambda engine: idle.take_from(engine))  # noqa: PLW0108 - of the class
        with ray_connection.connected("", cores=99):
            yield cluster
        assert not ray.is_initialized()
        cluster.shutdown()


class Idle:
    """Workers that have nothing to do; a run that needs more starts one."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._make, self._close = ray_cluster._remote, ray_cluster.RayCluster.close

    def remote(self) -> Any:
        return self._actors.pop() if self._actors else self._make(0.0).remote()

    def take_from(self, engine: ray_cluster.RayCluster) -> None:
        self._actors += [handle.actor for handle in engine._handles]
        engine._handles = []
        self._close(engine)

    def end(self) -> None:
        import ray

        while self._actors:
            ray.kill(self._actors.pop())


idle = Idle()


# Clients with state are in a test of their own.
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"together": 2},  # clients in groups
    "feddf": {"pool": 60, "proxy": "pool"},  # a server that distils, and samples that are held twice
    "fedavg+ccvr": {},  # a last exchange
    "fedavg+f2l": {"regions": 2, "participation": 1.0, "pool": 60},
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", KINDS)
def test_same_bits_as_in_one_process(run_small: RunSmall, method: str) -> None:
    settings = {"rounds": 2} | KINDS[method]
    ours, rays = run_small(method, **settings), run_small(method, **settings, engine="ray")
    assert torch.equal(weights(ours), weights(rays))
    for row in (*ours.records, *rays.records):
        row.get("episode", {}).pop("server_seconds", None)
    assert numbers(ours) == numbers(rays)


@pytest.mark.usefixtures("cluster")
def test_resumed_after_every_round_gives_the_same_bits_also_in_a_run_of_flowers(
    run_small: RunSmall, tmp_path: Path
) -> None:
    whole = run_small(Remembering(), rounds=3, out=tmp_path / "whole")
    run_small(Remembering(), rounds=1, out=tmp_path / "parts", engine="ray")
    fedstill.resume(tmp_path / "parts", method=Remembering(), rounds=2)
    config = tmp_path / "parts/config.toml"
    lines = config.read_text().replace('engine = "ray"', 'engine = "flower"').splitlines()
    config.write_text("\n".join([*lines[:-1], "# sha256 of the lines above: unchecked", ""]))
    last = fedstill.resume(tmp_path / "parts", method=Remembering(), rounds=3)
    assert last.config.engine == "ray"
    assert torch.equal(weights(last), weights(whole))
    assert numbers(last) == numbers(whole)
    states, expected = all_client_states(tmp_path / "parts"), all_client_states(tmp_path / "whole")
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[k]["past"], expected[k]["past"]) for k in expected)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("in_call", "inline"), [(1, 100_000), (5, 100_000), (5, 0)])
def test_more_clients_than_may_be_under_way_answer_in_their_order(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, in_call: int, inline: int
) -> None:
    """Also where the broadcast is too large to go along with every call, and goes through Ray's store."""
    monkeypatch.setattr(ray_connection, "_INLINE", inline)
    monkeypatch.setattr(ray_cluster.RayCluster, "_in_call", lambda _: in_call)
    settings = {"clients": 40, "participation": 1.0, "rounds": 1, "fraction": 0.2}
    assert torch.equal(weights(run_small(**settings)), weights(run_small(**settings, engine="ray")))


OWN = """
from dataclasses import dataclass
from importlib.util import find_spec
import fedstill
from beside import half

@dataclass(frozen=True)
class Halving(fedstill.FedAvg):
    def uplink(self, client):
        return {"model": half(client.weights)}
"""


@pytest.mark.usefixtures("cluster")
def test_what_no_node_can_import_works(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Typed(fedstill.FedAvg):
        """As typed into a notebook; it reads a file by a relative path."""

        def uplink(self, client: fedstill.Client) -> Message:
            return {"model": client.weights * float(Path("factor.txt").read_text())}

    monkeypatch.chdir(tmp_path)
    Path("factor.txt").write_text("0.5")
    settings = {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 10)), "rounds": 1}
    ours = run_small(Typed(), **settings)
    assert torch.equal(weights(ours), weights(run_small(Typed(), **settings, engine="ray")))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.py").write_text(OWN)
    (folder / "beside.py").write_text("def half(x):\n    return x * 0.5\n")
    of_a_file = run_small("./own/mine.py:Halving", **settings, engine="ray", callbacks=[Deleting(folder)])
    assert not folder.exists()
    assert torch.equal(weights(ours), weights(of_a_file))


class Deleting(fedstill.Callback):
    """A folder is gone once a run has begun, as if workers were on another machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_run_start(self, run: fedstill.RunView) -> None:
        shutil.rmtree(self._folder)


@dataclass(frozen=True)
class Failing(fedstill.FedAvg):
    """Client work that fails in the second round."""

    told: bool = False

    def uplink(self, client: fedstill.Client) -> Message:
        if client.round == 2:
            raise FedstillError("the scanner is switched off") if self.told else ValueError("boom")
        return super().uplink(client)


@pytest.mark.usefixtures("cluster")
def test_errors_arrive(run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedstillError, match=r"(?s)client work failed:\nTraceback.*in uplink.*ValueError: boom"):
        run_small(Failing(), engine="ray")
    with pytest.raises(FedstillError, match=r"^the scanner is switched off$"):
        run_small(Failing(told=True), engine="ray")
    lock = threading.Lock()

    def make() -> nn.Module:
        with lock:
            return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))

    with pytest.raises(FedstillError, match="engine = 'ray' cannot give this run to its workers"):
        run_small(model=make, engine="ray")
    home = {"folder": ".", "path": [], "versions": ray_cluster._versions(), "gpu": True}
    with pytest.raises(SettingError, match="PyTorch sees no GPUs here"):
        ray_cluster._Actor()._start(None, home)
    monkeypatch.setattr(ray_cluster, "_versions", lambda: "fedstill 0.0")
    with pytest.raises(FedstillError, match=r"of the Ray cluster has fedstill .* started with fedstill 0\.0; install"):
        run_small(engine="ray")


@pytest.mark.usefixtures("cluster")
def test_there_are_as_many_workers_as_there_is_room_for(tmp_path: Path) -> None:
    setup = prepare(resolve(SMALL))
    worker = Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path))
    room = {(n, gpus): ray_cluster.RayCluster(worker, n, cores=9, gpus=gpus)._room() for n in (0, 5) for gpus in (0, 1)}
    assert room == {(0, 0): 2, (0, 1): 1, (5, 0): 5, (5, 1): 5}  # cores, GPUs, and what was asked for


@pytest.mark.usefixtures("cluster")
def test_samples_are_read_where_they_lie_and_keep_their_layout() -> None:
    import ray

    images = (
        torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    )
    both = Split(images, torch.tensor([1, 0])), Split(images, torch.tensor([1, 1]), torch.zeros(0, dtype=torch.int64))
    one, other = ray.get(ray_connection.put(both, "samples"))
    assert torch.equal(one.x, images)
    assert one.x.is_contiguous(memory_format=torch.channels_last)
    assert one.x.data_ptr() == other.x.data_ptr()
    assert (one.y.tolist(), other.y.tolist(), one.client, other.client.tolist()) == ([1, 0], [1, 1], None, [])


@pytest.mark.usefixtures("cluster")
def test_work_that_ends_a_second_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    setup = prepare(resolve(SMALL))
    engine = ray_cluster.RayCluster(
        Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path)), 1, cores=1
    )
    groups, todo, deaths = [[Train(k, 2)] for k in range(6)], deque([5]), dict[int, int]()

    def die(*calls: list[int]) -> None:
        actor = ray_connection.load("").remote(object).options(num_cpus=99).remote()  # for which there is no room
        handle = ray_cluster.WorkerHandle(
            actor, None, "north", {f"answer {call}": ray_cluster.Call(call, []) for call in calls}
        )
        engine._handles = [handle]
        engine._drop(handle, todo, groups, deaths, OSError("gone"))

    die([3], [4])
    assert (list(todo), engine._handles, engine.deaths) == ([3, 4, 5], [], 1)
    die([4])  # for which it is the first time
    with pytest.raises(FedstillError, match=r"^client 3 in round 2, network cnn \(Stacked\), ended its worker 2 times"):
        die([3], [5])
    deaths.clear()
    die([1, 2], [0])  # whose work it was is not known
    assert deaths  # from now on each has a call of its own
    die([1])
    with pytest.raises(FedstillError, match=r"^client 1 in round 2, .* ended its worker 2 times"):
        die([1])


def test_small_clients_share_a_call_and_large_ones_have_one_each(tmp_path: Path) -> None:
    setup = prepare(resolve(SMALL))
    engine = ray_cluster.RayCluster(
        Worker(setup.task, setup.federation, fedstill.FedAvg(), Store(tmp_path)), 1, cores=1
    )
    assert engine._in_call() == 1  # how large they are is not known
    found = []
    for engine._pace in (0.0, 0.025, 0.05, 0.2, 60.0):
        found.append(engine._in_call())
    assert found == [8, 4, 2, 1, 1]


@dataclass(frozen=True)
class Unplugged(fedstill.FedAvg):
    """A node that goes down while a client of round 2 is at work there; the other node waits until then."""

    node: str = ""
    flag: str = ""

    def uplink(self, client: fedstill.Client) -> Message:
        import ray

        if client.round == 2 and ray.get_runtime_context().get_node_id() == self.node:
            Path(self.flag).touch()
            os.kill(os.getppid(), signal.SIGKILL)  # the node's own process
            os.kill(os.getpid(), signal.SIGKILL)
        while client.round == 2 and not Path(self.flag).exists():
            time.sleep(0.01)
        return super().uplink(client)


def test_a_node_that_dies_in_a_round_changes_no_bit(cluster: Any, run_small: RunSmall, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    settings = {"participation": 1.0, "rounds": 2}
    method = Unplugged(node=node.node_id, flag=str(tmp_path / "flag"))
    survived = run_small(method, **settings, engine="ray", workers=3, out=tmp_path / "run")
    assert "or the node is gone; it is tried once more" in (tmp_path / "run/log.txt").read_text()
    assert torch.equal(weights(survived), weights(run_small(**settings)))
    cluster.remove_node(node, allow_graceful=False)


class Cut(fedstill.Callback):
    """Ends a run in its second round, as Ctrl-C would."""

    def on_round_end(self, run: fedstill.RunView, record: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


class Seen(Watcher):
    def __init__(self) -> None:
        self.rounds: dict[str, list[int]] = {}

    def started(self, cell: Cell) -> None:
        assert cell.path.name not in self.rounds
        self.rounds[cell.path.name] = []

    def round_done(self, cell: Cell, round_: int) -> None:
        self.rounds[cell.path.name].append(round_)


@pytest.mark.usefixtures("cluster")
def test_whole_runs_on_nodes_have_the_bits_and_files_of_runs_here_whoever_dies(
    run_small: RunSmall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle.end()  # the cores of its workers are needed
    monkeypatch.setattr(studies_on_cluster, "_SECONDS", 0)  # what is written comes back after every round
    dying = Suicidal(flag=str(tmp_path / "flag"))
    methods = {"begun": Remembering(), "dying": dying, "failing": Failing(told=True)}
    with pytest.raises(KeyboardInterrupt):
        run_small(Remembering(), out=tmp_path / "begun", callbacks=[Cut()])
    cells = {}
    for name, method in methods.items():
        everyone = {"participation": 1.0} if method is dying else {}
        config, own = configure(method, {}, SMALL | everyone | {"engine": "ray"})
        cells[name] = Cell(tmp_path / name, config, own)
    seen = Seen()
    with pytest.raises(FedstillError, match=r"failing: the scanner is switched off; the others are finished$"):
        run_cells(list(cells.values()), jobs=1, watcher=seen)  # a process of Ray's carries out all
    assert (tmp_path / "flag").exists()
    assert seen.rounds == {"begun": [2, 3], "dying": [1, 2, 3], "failing": [1]}
    run_small(Remembering(), out=tmp_path / "here")
    run_small(dying, participation=1.0, out=tmp_path / "other")
    for there, here in (("begun", "here"), ("dying", "other")):
        names = [
            {str(file.relative_to(tmp_path / run)) for file in (tmp_path / run).rglob("*")} for run in (there, here)
        ]
        assert names[0] == names[1]
        for name in ("model.safetensors", "clients.csv", "model.json"):
            assert (tmp_path / there / name).read_bytes() == (tmp_path / here / name).read_bytes()
        assert fedstill.load(tmp_path / there)
        assert cells[there].finished


@pytest.mark.usefixtures("cluster")
def test_a_trial_of_a_search_goes_on_where_its_last_rung_ended(run_small: RunSmall, tmp_path: Path) -> None:
    idle.end()
    for rounds in (1, 3):
        config, own = configure("fedavg", {}, SMALL | {"engine": "ray", "rounds": rounds})
        trial = TrialRun(tmp_path / "trial", config, own)
        run_cells([trial], jobs=1)
        assert trial.rounds_done() == rounds
    run_small("fedavg", rounds=3, out=tmp_path / "here")
    assert (tmp_path / "trial/model.safetensors").read_bytes() == (tmp_path / "here/model.safetensors").read_bytes()


def test_a_wrong_address_and_a_missing_library_are_one_line(
    run_small: RunSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match=r"outside a cluster; start fedstill on a node"):
        run_small(engine="ray", ray_address="ray://10.0.0.1:10001")
    with pytest.raises(
        SettingError, match=r"ray_address = '127\.0\.0\.1:1': no Ray cluster answers there .* 'ray start"
    ):
        run_small(engine="ray", ray_address="127.0.0.1:1")
    for wrong in ("here", ":6379", "10.0.0.1:"):
        with pytest.raises(SettingError, match=rf"^ray_address = '{wrong}': should be host:port .* or auto$"):
            run_small(engine="ray", ray_address=wrong)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"^engine = 'ray' needs: pip install 'fedstill\[ray\]'$"):
        run_small(engine="ray")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files, of a short name: Ray has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="fs-") as folder:
        yield Path(folder)


def started_with(scratch: Path) -> list[str]:
    """What still runs of all that was started with this folder for temporary files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended
            continue
    return found


def test_ctrl_c_on_the_command_line_leaves_nothing_and_says_nothing_of_ray(tmp_path: Path, scratch: Path) -> None:
    words = command(tmp_path, tmp_path / "run", engine="ray", workers=1, rounds=99)
    variables = {key: value for key, value in environment().items() if not key.startswith("RAY_")}
    process = start(*words, env=variables | {"TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and rounds_written(tmp_path / "run") < 1:
        time.sleep(0.01)
    assert started_with(scratch)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate()
    assert process.returncode == 130, told
    assert "ray" not in told.lower()
    assert not started_with(scratch)
    assert not list(scratch.glob("fedstill-*"))
