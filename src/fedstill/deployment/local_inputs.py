"""What a site, or a region, puts in the place of files that a run's settings name: those are another's words."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from fedstill.building.config import Config, resolve
from fedstill.building.groups import group_config
from fedstill.core.reports import Code, Refusal
from fedstill.data import sources
from fedstill.methods import registry
from fedstill.metrics.scores import COUNTED, FUNCTIONS
from fedstill.models.pretrained import DISTILBERT


@dataclass(frozen=True)
class LocalInputs:
    """The data, code and device of a site, or a region, instead of those in the run's settings; empty: as there."""

    data: str = ""
    data_dir: str = ""
    target: str = ""  # of a table: the column with the label
    method: str = ""  # a file (file.py:name): no file that a server names is ever run
    model: str = ""
    text_column: str = ""  # of a table of text; which column is which, only the site says
    label_column: str = ""
    pretrained: str = ""  # a folder, or a name on the hub: neither is looked for where a server says
    device: str = "cpu"

    def config(self, text: str) -> Config:
        """The settings of a run, as a server sent them, with the local inputs in their place."""
        settings = tomllib.loads(text)
        files = {"method": self.method, "model": self.model, "data": self.data}
        settings |= {name: value for name, value in files.items() if value}
        settings.pop("tokenizer", None)  # the server sends it, not where it has it
        settings["metrics"] = [n for n in (*COUNTED, *FUNCTIONS) if n in settings.get("metrics", [])]  # no others
        settings |= {"target": self.target} if self.target else {}
        named = [(name, settings.get(name, "")) for name in ("method", "model", "data", "proxy")]
        named += [("method", region.get("method", "")) for region in settings.get("region", [])]
        for name, value in named:
            harmless = value in ("", "pool", *sources.names()) if name in ("data", "proxy") else ":" not in value
            if not harmless and value != files.get(name):  # the owner gave it, for this and nothing else
                raise Refusal(
                    Code.FILE_NAMED, f"the run has a {name} that is no name but a file, {value}; give yours to the site"
                )
        if settings.get("model") == "distilbert" and isinstance(settings.get("model_options", {}), dict):
            settings["model_options"] = self._with_own_encoder(settings.get("model_options", {}))
        settings |= {"text_column": self.text_column, "label_column": self.label_column}
        settings |= {} if settings.get("target") else {"client_column": ""}
        return resolve(settings, {"data_dir": self.data_dir, "device": self.device})

    def network(self, config: Config, group: int | None) -> Config:
        """The settings with the network here: the one that its group has, or its own.

        Its own has the group's options where the weights are the group's, else those of the run and, of the group's,
        the size of features that all networks have in common.
        """
        if group is None:
            return config
        dealt = group_config(config, config.each_group()[group])
        own = self.model or (dealt.model if dealt.model == "distilbert" and self.pretrained else "")
        if not own and is_a_file(dealt.model):
            raise Refusal(
                Code.FILE_NAMED,
                f"the run deals a network that is a file, or pretrained, {dealt.model}; give yours to the site",
            )
        if not own:
            return dealt
        options = dealt.model_options
        if own != dealt.model and not registry.make(config.method, config.hyper).model_per_group:
            common = {name: value for name, value in options.items() if name == "feature_size"}
            options = config.model_options | common
        options = self._with_own_encoder(options) if own == "distilbert" else options
        return dealt.model_copy(update={"model": own, "model_options": options})

    def _with_own_encoder(self, options: dict[str, Any]) -> dict[str, Any]:
        """A network's options with the site's pretrained encoder; the server's, if it is only the usual name."""
        if self.pretrained:
            return options | {"pretrained": self.pretrained}
        if (named := options.get("pretrained", DISTILBERT)) != DISTILBERT:
            raise Refusal(
                Code.FILE_NAMED, f"the run begins with a pretrained encoder, {named!r:.80}; give yours to the site"
            )
        return options


def is_a_file(model: str) -> bool:
    """Whether a network is no name of one, but somebody's file, or an encoder in somebody's folder."""
    return ":" in model or model == "distilbert"
