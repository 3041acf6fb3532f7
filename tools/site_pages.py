"""The pages of the documentation site that the program itself knows: methods, presets, settings, commands, the API."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, get_type_hints

from latex2mathml.converter import convert
from pydantic.fields import FieldInfo
from typer.main import get_command

import fedstill
from fedstill.analysis import listings
from fedstill.building.data import dataset_in, load_data
from fedstill.building.schema import Config, bounds
from fedstill.cli.claims import difference, seeds_for
from fedstill.cli.main import app
from fedstill.core.errors import SettingError
from fedstill.data import sources
from fedstill.methods import registry
from fedstill.methods.base import Method
from fedstill.methods.modifier import Modifier
from fedstill.methods.robust.rule import Robust
from fedstill.methods.server_side import ServerSide
from fedstill.studies import presets

DOCS = Path(__file__).parents[1] / "docs"
METHODS: dict[str, dict[str, Any]] = tomllib.loads((DOCS / "methods.toml").read_text())
PAPERS = {"fedkf": "FedKF", "f2l": "F2L", "dafkd": "DaFKD", "fedgkd": "FedGKD", "fedhyb": "FedHyb"}
SAMPLE = "LeNet-5 on 32x32 grey images of ten classes, 61,706 weights"


def pages() -> dict[str, str]:
    """Every generated page by its path."""
    found = {f"methods/{name}.md": method_page(name) for name in _names()}
    found |= {"methods/index.md": methods_index(), "presets.md": presets_page(), "settings.md": settings_page()}
    found |= {"commands.md": commands_page()}
    return found | {f"reference/{_slug(title)}.md": reference_page(title, names) for title, names in _sections()}


def _names() -> list[str]:
    """The library's own methods and modifiers: what other installed packages offer is not on the site."""
    return [name for name in (*registry.names(), *registry.modifiers()) if name in METHODS]


# --- methods ------------------------------------------------------------------------------------------------------


def kind(name: str) -> str:
    cls = registry.find_part(name)
    for base, words in (
        (Robust, "Robust rules"),
        (ServerSide, "Server sides"),
        (Modifier, "Modifiers"),
        (Method, "Client sides"),
    ):
        if issubclass(cls, base):
            return words
    raise AssertionError(name)


EXPLAINED = {
    "Client sides": "They say what a client minimises and sends. One comes first in a composition.",
    "Server sides": "They work on the server after the average: alone, or after any client side (`fedgkd+feddf`).",
    "Modifiers": "They change one answer of any method: `fedprox+t1`.",
    "Robust rules": "They keep malicious clients from spoiling any method; one stands last: `fedprox+median`.",
}


def methods_nav() -> list[dict[str, Any]]:
    return [
        {group: [{METHODS[name]["name"]: f"methods/{name}.md"} for name in _names() if kind(name) == group]}
        for group in EXPLAINED
    ]


def methods_index() -> str:
    lines = [
        "# Methods",
        "",
        "Each page is made from the method itself: what it minimises, its settings, what crosses the wire, what it "
        "costs, and what our runs say about its paper's claims. [Which one to take](../choose-a-method.md) is a guide "
        "of its own; [a method of yours](../your-own-method.md) is one short file.",
    ]
    for group, words in EXPLAINED.items():
        lines += ["", f"## {group}", "", words, "", "| id | what it does | needs | paper |", "|---|---|---|---|"]
        for name in (name for name in _names() if kind(name) == group):
            cls = registry.find_part(name)
            link = f"[`{_written(name)}`]({name}.md)"
            lines.append(f"| {link} | {_cell(_first_line(cls))} | {listings.needs_of(cls())} | {cls.paper} |")
    return "\n".join([*lines, "", NOTATION])


NOTATION = """\
## Notation

| symbol | meaning |
|---|---|
| w_t, w_k | global weights of round t, and those that client k has trained from them |
| S_t, K | the clients of the round (the cohort), and how many there are in all |
| n_k, n | training samples of client k, and of all clients of the round |
| n_k^y | those of class y |
| F_k(w) | client k's mean cross-entropy; every method adds to it |
| q(x; w), p(x; w) | logits of sample x, and their softmax; p^T at temperature T |
| f(x; w), h | features, the input of the last linear layer, and that layer |
| KL(p ‖ q) | Kullback-Leibler divergence, a mean over the batch; the teacher is first and gets no gradient |
| CE | cross-entropy |
| G, z, ε | a generator, and its noise |

Terms are in the [glossary](../glossary.md).
"""


def method_page(name: str) -> str:
    cls, about = registry.find_part(name), METHODS[name]
    paper = f"[{about['reference']}]({about['link']})" if "link" in about else about["reference"]
    doc = inspect.getdoc(cls) or ""
    run = _written(name) if name == _written(name) else f"fedavg{_written(name)}"
    lines = [f"# {about['name']}", "", doc, "", f"{paper}.", "", _as_console(run, cls()), ""]
    lines += ["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in _facts(name, cls)), "", "## Equations", ""]
    for says, latex in about["equations"]:
        lines += [says, "", math(latex), ""]
    lines += ["Symbols are those of [all pages](index.md#notation).", ""]
    if "note" in about:
        lines += [about["note"], ""]
    lines += [*_settings(name), *_wire(name), *_cost(about), *_results(about.get("rows", [])), *_presets(name)]
    return "\n".join(lines)


def _written(name: str) -> str:
    return f"+{name}" if name in registry.modifiers() else name


def _as_console(run: str, method: Method) -> str:
    needs = method.needs()
    pool = " --set pool=0.1" if needs.server_labels else ""
    if needs.proxy_data:
        pool = " --set pool=0.1 --set proxy=pool"
    regions = f" --regions {method.default_regions}" if method.default_regions > 1 else ""
    least = method.fewest_clients
    share = " --participation 0.5" if least > 4 else ""
    return f"```console\nfedstill run {run}{regions}{share}{pool}\n```"


def _facts(name: str, cls: type[Method]) -> list[tuple[str, str]]:
    group = kind(name)
    place = {
        "Client sides": "comes first in a composition",
        "Server sides": "alone, or after a client side",
        "Modifiers": "after any method that sends models",
        "Robust rules": "last, after any method whose parts it can protect",
    }
    others = ("feddf", "t1", "ccvr", "median", "krum")
    tried = [f"{name}+{other}" for other in others if name != other] if group.endswith("sides") else []
    tried += [f"{first}+{name}" for first in ("fedprox", "scaffold", "feddf") if group != "Client sides"]
    needs = listings.needs_of(cls())
    return [
        ("kind", f"{group.lower().removesuffix('s')}: {place[group]}"),
        ("such as", ", ".join(f"`{each}`" for each in tried if _composes(each)) or "it stands alone"),
        ("needs beyond FedAvg", needs or "nothing"),
        ("code", f"`{cls.__module__}`: `{cls.__name__}`"),
    ]


def _composes(name: str) -> bool:
    try:
        registry.make(name).check(_example("fedavg").task)
    except SettingError:
        return False
    return True


def _settings(name: str) -> list[str]:
    cls = registry.find_part(name)
    hints = get_type_hints(cls, include_extras=True)
    own = registry.own_settings(cls)  # type: ignore[arg-type]
    if not own:
        return ["## Settings", "", "It has none of its own; those of every run are [here](../settings.md).", ""]
    lines = ["## Settings", "", "On the command line `--set key=value`, in Python a keyword, in a file a line.", ""]
    lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for each in own:
        allowed = bounds(FieldInfo.from_annotation(hints[each.field]))
        lines.append(f"| `{each.name}` | {_code(each.default)} | {_cell(allowed)} | {_cell(each.meaning)} |")
    return [*lines, ""]


def _code(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else ""


def _wire(name: str) -> list[str]:
    lines = ["## What crosses the wire", "", f"Between the server and one client in one round, for {SAMPLE}."]
    lines += [" *Kind* is the word that a site's [policy](../security.md#what-a-site-agrees-to) knows it by.", ""]
    lines += ["| | part | what | kind | size |", "|---|---|---|---|--:|"]
    wire = _declared(name)
    total = {}
    for way, parts in (("down", wire.down), ("up", wire.up), ("up, after the last round", wire.last)):
        total[way] = sum(part.nbytes for part in parts.values())
        for part, told in parts.items():
            what = told.what + (" (not in every round)" if told.optional else "")
            lines.append(f"| {way} | `{part}` | {what} | {told.kind.value} | {_size(told.nbytes)} |")
    plain = sum(part.nbytes for part in _declared("fedavg").down.values())
    down, up = (f"{total[way] / plain:.3g}" for way in ("down", "up"))
    if name != "fedavg":
        lines += ["", f"FedAvg sends {_size(plain)} each way; this is {down} times as much down and {up} up."]
    return [*lines, ""]


@cache
def _declared(name: str) -> Any:
    setup = _example(f"fedavg+{name}" if name in registry.modifiers() else name)
    return setup.method.wire(setup.task)


@cache
def _example(method: str) -> Any:
    return listings.example(method, {}, _data())


@cache
def _data() -> Any:
    return dataset_in(load_data(Config(method="fedavg")))


def _size(n: float) -> str:
    return f"{n:,.0f} B" if n < 1000 else f"{n / 1000:,.3g} kB" if n < 1e6 else f"{n / 1e6:,.3g} MB"


def _cost(about: dict[str, Any]) -> list[str]:
    if "cost" not in about or about["cost"] == "1":
        return []
    return [
        "## Cost",
        "",
        f"A round takes {about['cost']} times as long as FedAvg's on ResNet-8; what is within a tenth of 1 is noise. "
        "[How it was measured](../performance.md#methods-growth-checkpoints-starts).",
        "",
    ]


def _results(rows: list[str]) -> list[str]:
    found = json.loads((DOCS / "results.json").read_text())
    lines = []
    for number, claim in enumerate(found["claims"], 1):
        ours = [check for check in claim["checks"] if any(side["row"] in rows for side in check["check"]["of"])]
        if ours and "difference" in ours[0]:
            lines += ["", f"**{number}. {claim['title']}** ({claim['paper']})", ""]
            lines += ["| check | in | difference | seeds | verdict |", "|---|---|--:|--:|---|"]
            for check in ours:
                cells = [check["check"]["says"], check["check"]["metric"], difference(check), seeds_for(check)]
                lines.append(f"| {' | '.join(map(_cell, cells))} | {check['verdict']} |")
    if not lines:
        return []
    head = "What our runs show of its paper's claims, at a scale that two cores can do: mean paired difference over "
    head += "seeds with its 95 % interval. [All of it, and how to read it](../results.md)."
    return ["## Results", "", head, *lines, ""]


def _presets(name: str) -> list[str]:
    def uses(preset: presets.Preset) -> bool:
        return any(name in registry.split(row.method) for row in preset.row if row.method)

    found = [f"[`{each}`](../presets.md)" for each in presets.names() if uses(presets.load(each))]
    return ["## In the papers' tables and figures", "", ", ".join(found) + ".", ""] if found else []


def math(latex: str) -> str:
    """LaTeX as MathML, which browsers draw themselves and screen readers read."""
    latex = latex.strip()
    drawn = convert(latex, display="block")
    return f'<div class="math" tabindex="0" role="region" aria-label="{escape(latex)}">{drawn}</div>'


# --- presets, settings, commands, data ----------------------------------------------------------------------------


def presets_page() -> str:
    lines = [
        "# Presets",
        "",
        "A preset is a readable file with a paper's settings and numbers. `fedstill reproduce NAME --scale cpu` runs "
        "it and sets the paper's numbers beside ours; the `cpu` scale says what it reduces for two cores.",
        "",
        "```console\nfedstill presets fedkf/table5 --scale cpu                # its runs and settings\n"
        "fedstill reproduce fedkf/table5 --scale cpu --dry-run   # how many runs, and about how long\n```",
    ]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", "| name | what it shows | as | `cpu` reduces |", "|---|---|---|---|"]
        for name in (name for name in presets.names() if name.startswith(f"{paper}/")):
            preset = presets.load(name)
            reduces = preset.cpu.reduces if preset.cpu else ""
            parts = f" ({', '.join(f'`{part}`' for part in preset.parts)})" if preset.parts else ""
            lines.append(f"| `{name}` | {_cell(preset.title)}{parts} | {preset.shows} | {_cell(reduces)} |")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting of a run: by flag where there is one, by `--set name=value`, in `config.toml`, or as a keyword "
        "in Python. A flag wins over the file, the file over the default. `fedstill run METHOD --dry-run` prints all "
        "of them as TOML. A method's own settings are on [its page](methods/index.md).",
        "",
        "| name | default | allowed | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in Config.model_fields.items():
        default = "" if field.default_factory or field.default is None else _code(field.default)
        lines.append(f"| `{name}` | {default} | {_cell(bounds(field))} | {_cell(field.description or '')} |")
    return "\n".join(lines) + "\n"


BLOCK = "\b\n"  # how click is told to leave lines as they are


def commands_page() -> str:
    lines = ["# Commands", "", "What `fedstill COMMAND --help` says, of all of them.", ""]
    for name, command in _commands(get_command(app), "fedstill"):
        arguments = " ".join(_argument(p) for p in command.params if p.param_type_name == "argument")
        lines += [f"## {name}", "", f"```text\n{name} {arguments}".rstrip() + " [OPTIONS]\n```", ""]
        lines += [_plain(inspect.cleandoc(command.help or "").partition("\f")[0]), ""]
        rows = [(_flags(p), _plain(getattr(p, "help", "") or "")) for p in command.params]
        rows = [(flags, words) for flags, words in rows if words]
        if rows:
            lines += ["| | |", "|---|---|", *(f"| {flags} | {_cell(words)} |" for flags, words in rows), ""]
    return "\n".join(lines)


def _commands(command: Any, name: str) -> list[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        return [(name, command)]
    return [pair for key, each in command.commands.items() for pair in _commands(each, f"{name} {key}")]


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required else f"[{name}]"


def _flags(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_argument(parameter)}`"
    return ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))


def _plain(text: str) -> str:
    """Help for a terminal as Markdown: what is set off there is a block, what looks like a tag is text."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\\[", "["))
    return "\n\n".join(
        f"```text\n{inspect.cleandoc(each.removeprefix(BLOCK))}\n```"
        if each.startswith(BLOCK)
        else re.sub(r"<(\w)", r"&lt;\1", each)
        for each in paragraphs
    )


def datasets_table() -> str:
    lines = ["| name | training samples | test samples | classes | shape | from |", "|---|--:|--:|--:|---|---|"]
    for row in sources.describe():
        counts = (f"{count:,}" if count else "–" for count in (row.train, row.test))
        shape = "×".join(map(str, row.shape)) or "text"
        lines.append(f"| `{row.name}` | {' | '.join(counts)} | {row.classes} | {shape} | {_origin(row.origin)} |")
    return "\n".join(lines)


def _origin(address: str) -> str:
    return f"[{re.sub(r'^https?://(www[.])?', '', address).partition('/')[0]}]({address})"


# --- the API ------------------------------------------------------------------------------------------------------


def _sections() -> list[tuple[str, list[str]]]:
    """The public names by the headings of docs/api.md, whose tables list all of them."""
    text, found = (DOCS / "api.md").read_text(), []
    for section in text.split("\n## ")[1:]:
        names = [name for name in re.findall(r"^\| `(\w+)` \|", section, flags=re.M) if name in fedstill.__all__]
        if names:
            found.append((section.partition("\n")[0], names))
    missing = set(fedstill.__all__) - {name for _, names in found for name in names}
    assert not missing, f"docs/api.md does not list {sorted(missing)}"
    return found


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def reference_nav() -> list[dict[str, Any]]:
    return [{"Python": [{title: f"reference/{_slug(title)}.md"} for title, _ in _sections()]}]


def reference_page(title: str, names: list[str]) -> str:
    lines = [f"# {title}", "", "[The Python API](../api.md) is the tour; these are the names, one by one.", ""]
    for name in names:
        target = getattr(fedstill, name)  # where it is defined, and under which name
        lines += [f"::: {target.__module__}.{target.__name__}", "    options:", f"      heading: fedstill.{name}", ""]
    return "\n".join(lines)


def _first_line(cls: type[Method]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
