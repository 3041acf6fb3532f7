"""A site's own account of what it has given away of its samples: over all runs, on its disk, whatever a server says."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.files import read_sealed_json, write_sealed_json
from fedstill.core.reports import Code, Refusal
from fedstill.deployment.policy import Policy
from fedstill.methods.base import Method
from fedstill.methods.dp import PrivateClients
from fedstill.methods.dp_sgd import DPSGD
from fedstill.privacy.accounting import Release, composed
from fedstill.train.task import LocalTraining, Task


class PrivacyLedger:
    """Every private training of a site is counted before it begins: an answer that comes too late was sent as well."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self._path, self._policy = path, policy

    def check(self, name: str, task: Task, method: Method) -> None:
        """Refuse, where there is a limit, a method that hides nothing from its server, or not all."""
        if not self._policy.max_epsilon:
            return
        # What is composed after it could send something else: a server may name what it would refuse itself.
        guarantee = method.guarantee if isinstance(method, PrivateClients | DPSGD) else None
        if guarantee is None or guarantee.release(1, task.local) is None:
            raise Refusal(
                Code.NOT_ALLOWED,
                f"this site's policy has max_epsilon, and {name} hides nothing from its server: that takes +dp-sgd, or "
                "+dp with noise_shares and secure_aggregation, and nothing after it",
            )
        guarantee.check_private(task)

    def spend(self, method: Method, samples: int, local: LocalTraining) -> None:
        """Count a round of training on so many samples; refuse it if it would spend more than the policy allows."""
        release = _release(method, samples, local)
        if release is None:
            return
        spent = _added(self.read(), release)
        if most := self._policy.max_epsilon:
            epsilon = composed(spent, self._policy.delta)
            if epsilon > most:
                raise Refusal(
                    Code.LIMIT_EXCEEDED,
                    f"with this round the site would have spent epsilon {epsilon:.3g} at delta {self._policy.delta:g}, "
                    f"and its policy allows {most:g} (max_epsilon); {self._path} has the account",
                )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed_json(self._path, {"spent": [list(each) for each in spent]})

    def read(self) -> list[Release]:
        """What was given away so far; damage is not taken for nothing."""
        if not self._path.exists():
            return []
        return [
            Release(float(noise), float(share), int(times))
            for noise, share, times in read_sealed_json(self._path)["spent"]
        ]


def _release(method: Method, samples: int, local: LocalTraining) -> Release | None:
    return method.guarantee.release(samples, local) if method.guarantee else None


def _added(spent: list[Release], release: Release) -> list[Release]:
    """With like entries in one."""
    times = {(each.noise, each.sampled): each.times for each in spent}
    kind = release.noise, release.sampled
    times[kind] = times.get(kind, 0) + release.times
    return [Release(*kind, count) for kind, count in times.items()]
