"""The end of a run: every site that is connected gets the final model, checks it, and keeps it in its own folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstill.building.config import Config
from fedstill.core import device, trust
from fedstill.core.errors import in_one_line
from fedstill.core.files import write_atomic
from fedstill.core.owner import owner_only, private_folder
from fedstill.core.reports import Code, Refusal, cleaned
from fedstill.core.tree import Tree
from fedstill.deployment.protocol import SiteLink, failure_reason
from fedstill.deployment.registry import SiteRegistry
from fedstill.engine.worker import Score, Worker
from fedstill.inference.description import OWN, describe, model_bytes, unwrapped
from fedstill.methods.base import Part, fault
from fedstill.running import files
from fedstill.train.task import classifier

log = logging.getLogger(__name__)

FINISH = "Finish"  # the kind of the request
_MOST_SECONDS = 120.0  # that a site may take to test and write the model


def deliver(
    link: SiteLink,
    registry: SiteRegistry,
    models: Mapping[str, Tensor],
    groups: Sequence[str] = (),
    *,
    timeout: float,
) -> None:
    """Send the first of the models to every site that is connected, or that of its client's group.

    `groups`: the name of each client's. Whoever does not get it is named; no run fails.
    """
    first, seconds = next(iter(models), ""), min(timeout, _MOST_SECONDS)
    downs = {name: {"model": model.cpu()} for name, model in models.items()}

    def request(site: str) -> Tree:
        name = groups[int(registry.clients[site][0])] if groups else first
        return registry.request(site, {"kind": FINISH, "model": name}, downs.get(name, {}), seconds)

    try:
        connected = link.present()
        requests = {
            site: request(site)
            for site in registry.clients
            if site in connected and site not in registry.missing  # who could not take part is not asked again
        }
        for site, answer in link.send_requests(requests, timeout=seconds) if requests else ():
            if isinstance(answer, dict) and answer.get("received") is True:
                log.info("%s has the final model", site)
            else:
                log.warning("%s has not got the final model: %s", site, failure_reason(answer))
    except Exception as error:  # noqa: BLE001 - the run has ended well, whatever the network does now
        log.warning("the final model was not sent to all sites: %s", in_one_line(error))


def is_finish(body: Any) -> bool:
    """Whether a request says that the run has ended."""
    return isinstance(body, dict) and body.get("kind") == FINISH


def keep_model(folder: Path, worker: Worker, config: Config, client: int, name: Any, down: Tree) -> str:
    """Write the final model, once it is known to be one of this task, for `fedstill.load`; what there is to say of it.

    Where there is no global model it is the site's own. Nothing about it is sent.
    """
    task, method = worker.task, worker.method
    wanted = {"model": Part((task.size,), "the final model", task.dtype)} if method.global_model else {}
    if problem := fault(down, wanted):
        raise Refusal(Code.BAD_REQUEST, f"the final model is refused: {problem}")
    if method.global_model:
        name, model = cleaned(name, 80) or "model", down["model"]
    else:
        name, model = OWN, method.own_model(worker.store.latest(client) or {}, {})
        if model is None:
            return "finished: the method has no global model, and this site has not trained one of its own"
    description = describe(config, task, method, [name])
    with device.on(device.CPU):
        net = task.build()
    net.load(model.cpu())
    module = task.without_statistics(unwrapped(classifier(net)))
    private_folder(folder)
    with owner_only():
        (folder / files.DESCRIPTION).unlink(missing_ok=True)  # of a run before; never beside another's weights
        write_atomic(folder / files.MODEL, model_bytes(description, module.state_dict()))
        trust.record(folder, description.code)
        write_atomic(folder / files.DESCRIPTION, description.as_json(indent=2) + "\n")
    return f"finished: the model is in {folder}, for fedstill.load or 'fedstill predict'{_accuracies(worker, model)}"


def _accuracies(worker: Worker, model: Tensor) -> str:
    """How the initial and the final model do on the site's own tests, for its owner."""
    count = len(worker.federation.test_index)
    if not count:
        return ""
    whole, labels = Score("local", 0, count), worker.federation.test_split.y[worker.federation.test_index]
    before, after = (
        float((worker.handle(whole, {"model": weights})["predicted"].cpu() == labels).double().mean())
        for weights in (worker.task.initial, model)
    )
    return f"; right on {100 * after:.1f} % of your {count:,} tests, {100 * before:.1f} % before the first round"
