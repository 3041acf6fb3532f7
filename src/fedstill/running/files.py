"""Every file of a run directory, by name. Nothing else in fedstill spells one.

config.toml         every setting; `fedstill run config.toml` repeats the run
metrics.jsonl       one JSON object a round
summary.json        best and final numbers, cost, versions; there when the run is finished
digests.json        the digests of the results, written last; `fedstill verify` checks them and everything else
clients.csv         each client's samples and its accuracy under the final model
model.safetensors   the final model as named tensors, and in its header what model.json says
model-….safetensors the further models that the method evaluates, such as that without T1
model.json          what a prediction needs beside the weights: preprocessing, classes, network; for `fedstill.load`
tokenizer.json      what made tokens of text, where the data are text
preprocessing.json  what each column of a table is, and what it is standardised by, where the data are a table
frozen.txt          the digest of weights that are not trained, where there are some
code.json           the digests of files of the user's own that the settings name
best.safetensors    the model of the best round, if a callback was to keep it
best-….safetensors  the same of each group, where clients have different networks
rounds.csv          the numbers of every round, if a callback was to write them
curves.png          the learning curves, where the command line or a tracker drew them
report.html         a page about the run, where a tracker was to have it
models/             the global model after some of the rounds, if the run was to save them
teachers/           the regions' models at each episode's end, if the run was to save them
checkpoints/        the last rounds' server state (keep_checkpoints), the clients' own, and an index with their digests
tensorboard/        events for TensorBoard, if they were asked for
wandb/              files for Weights & Biases, if they were asked for
run.json            the run's number and its sites, if its clients are elsewhere
counts.json         the numbers of samples that each of them reported when it joined
received.jsonl      what each of them sent, and its digest
audit/              what an attacker learns of it, if that was looked at: audit.json, a picture, and shadow runs
log.txt             what happened when

A folder of several runs, as `fedstill compare` makes, also has:

comparison.json     every number of the comparison, its runs in the order of its tables
students/           how accurate students of saved teachers were, so that presets and claims teach none twice

and one that `fedstill tune` makes, with a folder for each method and its trials:

tuning.json         every trial, its settings and what it came to; the winners
"""

from __future__ import annotations

import re

from fedstill.core import trust

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
DIGESTS = "digests.json"
CLIENTS = "clients.csv"
MODEL = "model.safetensors"
FURTHER_MODELS = "model-*.safetensors"
DESCRIPTION = "model.json"
TOKENIZER = "tokenizer.json"
PREPROCESSING = "preprocessing.json"
FROZEN = "frozen.txt"
BEST = "best.safetensors"
BEST_OF_GROUPS = "best-*.safetensors"
ROUNDS = "rounds.csv"
CURVES = "curves.png"
REPORT = "report.html"
MODELS = "models"
TEACHERS = "teachers"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
MLFLOW = "mlruns"  # beside run directories, if MLflow is to write there
SERVED = "run.json"
COUNTS = "counts.json"
RECEIVED = "received.jsonl"
LOG = "log.txt"
AUDITS = "audit"  # a folder
AUDIT = "audit.json"  # in it
AUDIT_PICTURE = "audit.png"
COMPARISON = "comparison.json"  # beside run directories
STUDENTS = "students"  # beside run directories
TUNING = "tuning.json"  # beside the folders of trials

INPUTS = (TOKENIZER, PREPROCESSING, FROZEN)  # written before the first round
RESULTS = (SUMMARY, CLIENTS, MODEL, DESCRIPTION, CURVES)  # written at the end
REPLACED = (
    DIGESTS,
    METRICS,
    BEST,
    ROUNDS,
    *RESULTS,
    TOKENIZER,
    PREPROCESSING,
    LOG,
    trust.CODE,
    RECEIVED,
)  # by a new run in the same place


def further_model(name: str) -> str:
    """The file of a model that is not the first of its method's.

    >>> further_model("without T1")
    'model-without-t1.safetensors'
    """
    return f"model-{_slug(name)}.safetensors"


def best_model(group: str) -> str:
    """The file of a group's model of the best round.

    >>> best_model("Phones")
    'best-phones.safetensors'
    >>> best_model("Ärzte & Co.")
    'best-ärzte-co.safetensors'
    """
    return f"best-{_slug(group)}.safetensors"


def _slug(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")
