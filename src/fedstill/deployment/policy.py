"""What a site agrees to: methods, kinds of information, and limits. Checked here, before any work for a server."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from fedstill.building.config import Config, read_toml
from fedstill.building.task import network_maker
from fedstill.core import custom
from fedstill.core.errors import SettingError, explain, unknown
from fedstill.core.files import read_json, write_json
from fedstill.core.reports import Code, Refusal, cleaned
from fedstill.data.dataset import Dataset
from fedstill.data.preprocessing import TablePreprocessing, from_json
from fedstill.methods import registry
from fedstill.methods.base import Method, Part, misfit
from fedstill.methods.kinds import COLUMN_STATISTICS, MEANING, Kind
from fedstill.running.rollback import ROLLBACKS
from fedstill.train.task import Task

_MOST_TEXT = 1 << 20  # bytes of settings
_MOST_TOKENIZER = 64 << 20  # bytes of a tokenizer's JSON
_MOST_TABLE = 16 << 20  # bytes of the description of a table's columns


_KINDS = [kind.value for kind in Kind]
Limit = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Policy:
    """What a site's owner allows. The default: methods that send weights alone, of sizes that are common."""

    allow: tuple[str, ...] = ()  # methods that may send more than weights, or kinds that may be sent
    deny: tuple[Kind, ...] = ()  # kinds of information that never leave the site
    max_rounds: Annotated[int, Field(ge=0)] = 0  # trainings for one run, at most; 0: no limit
    max_hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of work for one run, at most; 0: no limit
    min_count: Limit = 5  # rows behind a number or a category of a table's statistics, at least
    secure_only: bool = False  # whether updates leave this site only under masks (secure_aggregation)
    min_sites: Annotated[int, Field(ge=2)] = 3  # updates in a masked sum that this site's may be in, at least
    # What all private runs together may tell of a sample (+dp-sgd), or of all that is here (+dp with noise_shares), and
    # how likely that may fail. 0: no limit. With one, runs that hide nothing from their server are refused.
    max_epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    known_sites: str = (
        ""  # folder with the sites' public keys (NAME.pub): masked sums with these alone; empty: with any
    )
    download: bool = False  # whether datasets and encoders that a server names may be fetched
    max_parameters: Limit = 500_000_000  # numbers in the network
    max_epochs: Limit = 1000  # passes over the data in a round
    max_batch_size: Limit = 65_536  # samples of a batch
    max_image_size: Limit = 1024  # pixels of an image's side
    max_length: Limit = 8192  # tokens of a text
    max_clients: Limit = 1_000_000  # clients, proxy samples, tokens of a vocabulary or regions of a run
    max_setting: Limit = 100_000  # any other number among the settings of a method or a network

    @property
    def most_seconds(self) -> float:
        return self.max_hours * 3600 or math.inf


def read(path: Path | None, **given: Any) -> Policy:
    """The policy in a file, with what is given otherwise instead of it, or in addition to its lists."""
    found = read_toml(path) if path else {}
    for name, value in given.items():
        if isinstance(value, list):
            found[name] = [*found.get(name, []), *value]
        elif value is not None:
            found[name] = value
    for name in found:
        if name not in (fields := [f.name for f in dataclasses.fields(Policy)]):
            raise unknown("setting of a policy", name, fields)
    try:
        policy = TypeAdapter(Policy).validate_python(found)
    except ValidationError as error:
        raise SettingError(f"{path or 'policy'}: {explain(error)}") from error
    for name in policy.allow:
        for part in [] if custom.is_reference(name) or name in _KINDS else registry.split(name):
            if part not in (known := [*registry.names(), *registry.modifiers(), *_KINDS]):
                raise unknown("method or kind of information", part, known)
    return policy


# --- limits -----------------------------------------------------------------------------------------------------------


def check_text(text: Any) -> str:
    """The settings as text, before anything reads them."""
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        raise Refusal(Code.LIMIT_EXCEEDED, f"the run's settings are no text of at most {_MOST_TEXT:,} characters")
    return text


def check_settings(policy: Policy, config: Config) -> None:
    """Refuse settings that would exhaust the site."""
    _check_limit("regions", config.regions, policy.max_clients)  # before there is a table for each
    if policy.secure_only and not config.secure_aggregation:
        raise Refusal(
            Code.NOT_ALLOWED, "this site's policy is secure_only, and the run has not secure_aggregation = true"
        )
    tables = config.each_region()
    limits = {
        "epochs": (max(config.epochs, *(t.epochs or 0 for t in tables)), policy.max_epochs),
        "batch_size": (max(config.batch_size, *(t.batch_size or 0 for t in tables)), policy.max_batch_size),
        "image_size": (config.image_size, policy.max_image_size),
        "max_length": (config.max_length, policy.max_length),
        **{name: (getattr(config, name), policy.max_clients) for name in ("clients", "proxy_size", "vocabulary")},
    }
    for name, (value, most) in limits.items():
        _check_limit(name, value, most)
    _check_limit("number of models", len(config.models) + len(config.group), 1000)
    settings = [config.hyper, config.model_options, *(table.hyper for table in tables)]
    settings += [group.model_options for group in config.each_group()]
    for name, value in [pair for table in settings for pair in _numbers(table)]:
        _check_limit(name, abs(value), policy.max_setting)


def _check_limit(name: str, value: float, most: float) -> None:
    if value > most:
        raise Refusal(
            Code.LIMIT_EXCEEDED, f"the run's {name} is {value:g}, and this site's policy allows {most:g} at most"
        )


def _numbers(node: Any, name: str = "settings") -> Iterator[tuple[str, float]]:
    """Every number in a table of settings, and how long its lists are."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _numbers(value, str(key)[:40])
    elif isinstance(node, list | tuple):
        yield name, len(node) ** 2  # lists are layers: a thousand of them are no network
        for value in node:
            yield from _numbers(value, name)
    elif isinstance(node, int | float):
        yield name, node


def check_run(policy: Policy, run: Mapping[str, Any]) -> None:
    """Refuse a description of a run that is none, or would exhaust the site."""
    whole = {"client": policy.max_clients, "clients": policy.max_clients, "checkpoint": 10**9}
    for name, most in whole.items():
        if type(run[name]) is not int or run[name] < 0:
            raise Refusal(Code.BAD_REQUEST, f"the run's {name} is no whole number")
        _check_limit(name, run[name], most)
    lists: dict[str, tuple[type | tuple[type, ...], int]] = {
        "classes": (str, 100_000), "mean": ((int, float), 4096), "std": ((int, float), 4096), "shape": (int, 8),
        "steps": (int, policy.max_clients), "frozen": (str, 1000), ROLLBACKS: (int, 10_000),
        "class_weight": ((int, float), 100_000),
    }  # fmt: skip
    for name, (kind, most) in lists.items():
        value = run.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise Refusal(Code.BAD_REQUEST, f"the run's {name} is no list of the kind that it should be")
        _check_limit(f"number of {name}", len(value), most)
    for count in run["steps"]:
        _check_limit("steps", count, 1000 * policy.max_setting)
    weights = run.get("class_weight", [])
    if weights and (len(weights) != len(run["classes"]) or not all(0 < w <= policy.max_setting for w in weights)):
        raise Refusal(Code.BAD_REQUEST, "the run's class_weight is not a positive number within limits for each class")
    if not isinstance(run["tokenizer"], str):
        raise Refusal(Code.TOKENIZER_REFUSED, "the run's tokenizer is no text")
    if len(run["tokenizer"]) > _MOST_TOKENIZER:
        raise Refusal(Code.TOKENIZER_REFUSED, f"the run's tokenizer has more than {_MOST_TOKENIZER:,} characters")


def table_of(run: Mapping[str, Any]) -> TablePreprocessing | None:
    """What the server says of the columns of a table; None: the run is about none."""
    text = run.get("table", "")
    if not isinstance(text, str) or len(text) > _MOST_TABLE:
        raise Refusal(Code.BAD_REQUEST, f"the run's table is no text of at most {_MOST_TABLE:,} characters")
    found = from_json(text) if text else None
    if not isinstance(found, TablePreprocessing | None):
        raise Refusal(Code.BAD_REQUEST, "the run's table is none")
    return found


def check_network(policy: Policy, config: Config, dataset: Dataset, method: Method) -> None:
    """Refuse a network that is too large, before there is memory for it."""
    if custom.is_reference(config.model) or config.model == "distilbert":
        return  # the site's own file, or an encoder that it has
    with torch.device("meta"):
        net = network_maker(config, dataset, method, None)()
    count = sum(p.numel() for p in [*net.parameters(), *net.buffers()])
    _check_limit("number of parameters", count, policy.max_parameters)


# --- consent ----------------------------------------------------------------------------------------------------------


def kinds_of(method: Method, task: Task) -> dict[str, Kind]:
    """The kind of each part that a client of this method sends, by name."""
    wire = method.wire(task)
    return {name: part.kind for parts in (wire.up, wire.last) for name, part in parts.items()}


_Question = tuple[str, str, tuple[Kind, ...]]  # the run, its method, and what it sends


class Consent:
    """Whether a site takes part in a run. `ask` puts a question to its owner, and may take its time."""

    def __init__(self, policy: Policy, ask: Callable[[str], bool] | None = None) -> None:
        self.policy, self._ask = policy, ask
        self._answers: dict[_Question, bool | None] = {}  # None: the owner has been asked

    def check(self, number: str, name: str, method: Method, task: Task) -> None:
        """Refuse a method that may not send what it sends: by the policy, or by the owner."""
        sent = set(kinds_of(method, task).values())
        if denied := sorted(sent & set(self.policy.deny)):
            raise Refusal(Code.NOT_ALLOWED, f"{name} sends {', '.join(denied)}, which this site's policy denies")
        if not sent - {Kind.WEIGHTS, *self.policy.allow} or name in self.policy.allow:
            return
        parts = _parts_beyond_weights(name, task)
        if not parts and not any(map(custom.is_reference, registry.split(name))):
            parts = [name]  # which by its defaults sends weights alone: it is these settings
        unnamed = [part for part in parts if part not in self.policy.allow]
        if not unnamed:
            return
        beyond = "; ".join(f"{kind} ({MEANING[kind]})" for kind in sorted(sent - {Kind.WEIGHTS}))
        answer = self._owner_answer(
            (number, name, tuple(sorted(sent))), f"a server wants to run {name}, which sends beside weights: {beyond}"
        )
        if answer:
            return
        flags = " ".join(f"--allow {part}" for part in unnamed)
        raise Refusal(
            Code.NOT_ALLOWED if answer is False else Code.CONSENT_PENDING,
            f"{name} sends beside weights: {beyond}; to allow it, start the site with {flags}, or name it in its "
            "policy",
        )

    def check_setting(self, number: str, setting: str, kind: Kind) -> None:
        """Refuse to send what a setting of the run asks for, whatever its method: by the policy, or by the owner."""
        question = f"a server's run has {setting}, which sends {kind} ({MEANING[kind]})"
        self._check_kind((number, setting, (kind,)), kind, question)

    def check_statistics(self, number: str, columns: Sequence[str]) -> None:
        """Refuse to tell sums over a table's columns, unless the policy or the owner allows it."""
        more = f" and {len(columns) - 20} more" if len(columns) > 20 else ""
        names = cleaned(", ".join(columns[:20]), 400) + more
        question = f"a server wants statistics of this site's table: {COLUMN_STATISTICS}; of the columns {names}"
        self._check_kind((number, f"columns {names}", (Kind.STATISTICS,)), Kind.STATISTICS, question)

    def _check_kind(self, key: tuple[str, str, tuple[Kind, ...]], kind: Kind, question: str) -> None:
        if kind in self.policy.deny:
            raise Refusal(Code.NOT_ALLOWED, f"{question}; this site's policy denies {kind}")
        if kind in self.policy.allow:
            return
        if not (answer := self._owner_answer(key, question)):
            raise Refusal(
                Code.NOT_ALLOWED if answer is False else Code.CONSENT_PENDING,
                f"{question}; to allow it, start the site with --allow {kind}, or name it in its policy",
            )

    def allows(self, kind: Kind) -> bool:
        """Whether the policy lets a kind of information be sent that no method sends."""
        return kind in self.policy.allow and kind not in self.policy.deny

    def _owner_answer(self, about: _Question, question: str) -> bool | None:
        """The owner's answer; None: there is none yet. A server does not wait as long as a person may take."""
        if self._ask is None:
            return False
        if about not in self._answers:
            if None in self._answers.values():
                return None  # one question at a time, however many runs a server names
            self._answers[about] = None
            thread = threading.Thread(
                target=self._ask_owner, args=(about, question, self._ask), name="consent", daemon=True
            )
            thread.start()
        return self._answers[about]

    def _ask_owner(self, about: _Question, question: str, ask: Callable[[str], bool]) -> None:
        self._answers[about] = ask(question)


def _parts_beyond_weights(name: str, task: Task) -> list[str]:
    """The composed methods that on their own would send more than weights; a file is the owner's own choice."""
    named = [(part, cls) for part, cls in zip(registry.split(name), registry.find(name), strict=True)]
    named = [(part, cls) for part, cls in named if not custom.is_reference(part)]
    return [part for part, cls in named if set(kinds_of(cls(), task).values()) - {Kind.WEIGHTS}]


def check_message(message: Any, declared: Mapping[str, Part], deny: Sequence[Kind]) -> None:
    """Refuse to send what a method did not declare, or what is denied."""
    if problem := misfit(message, dict(declared)):
        raise Refusal(Code.ANSWER_UNDECLARED, f"the method's answer is not what it declares: {problem}")
    if any(declared[name].kind in deny for name in message):
        raise Refusal(Code.NOT_ALLOWED, "the method sends what this site's policy denies")


class Usage:
    """How much a site has worked for one run, on disk: a restart does not begin anew."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._path, self._policy = folder / "spent.json", policy
        self._limited = bool(policy.max_rounds or policy.max_hours)

    @contextmanager
    def work(self, *, training: bool) -> Iterator[None]:
        """Refuse what is beyond the limits, and count what is not."""
        if not self._limited:
            yield
            return
        found = read_json(self._path) if self._path.is_file() else {"trainings": 0, "seconds": 0.0}
        policy = self._policy
        if training and policy.max_rounds and found["trainings"] >= policy.max_rounds:
            raise Refusal(
                Code.LIMIT_EXCEEDED, f"this site has trained {policy.max_rounds} times for the run (max_rounds)"
            )
        if found["seconds"] >= policy.most_seconds:
            raise Refusal(
                Code.LIMIT_EXCEEDED, f"this site has worked {policy.max_hours:g} hours for the run (max_hours)"
            )
        began = time.monotonic()
        try:
            yield
        finally:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            seconds = found["seconds"] + time.monotonic() - began
            write_json(self._path, {"trainings": found["trainings"] + training, "seconds": seconds})
