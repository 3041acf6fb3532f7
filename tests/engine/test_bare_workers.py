"""What goes to another process of a worker whose clients have different networks."""

from __future__ import annotations

from typing import Any

from fedstill.building.config import resolve
from fedstill.building.setup import prepare
from fedstill.core.store import Store
from fedstill.engine.ray_cluster import _bare
from fedstill.engine.worker import Worker
from support.quick import TINY


def test_groups_go_without_networks_and_know_each_other_there(tmp_path: Any) -> None:
    settings = {name: value for name, value in TINY.items() if name not in ("model", "model_options")}
    setup = prepare(resolve(settings | {"method": "fedgkd", "across": True, "models": ["mlp", "cnn"]}))
    regional = tuple((group.task, setup.method) for group in setup.groups)
    bare = _bare(Worker(setup.task, setup.federation, setup.method, Store(tmp_path), regional))
    mlp, cnn = (task for task, _ in bare.regional)
    assert (mlp.group, cnn.group) == ("mlp", "cnn")
    assert mlp.others[0] is cnn
    assert cnn.others[0] is mlp
    for task in (bare.task, mlp, cnn):
        assert "nets" not in vars(task)
    assert [setup.method.wire(task) for task in (mlp, cnn)] == [setup.method.wire(g.task) for g in setup.groups]
