"""What a name that is no setting was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable

from fedstill.core.errors import SettingError, unknown

# What other libraries and papers call a setting.
_CALLED = {
    "alpha": "dirichlet_alpha dir_alpha concentration",
    "attackers": "n_attackers num_attackers malicious byzantine_clients",
    "batch_size": "batchsize bs batch local_batch_size train_batch_size",
    "checkpoint_every": "checkpoint_interval save_every",
    "clients": "n_clients num_clients client_num n_parties num_users n_nodes",
    "clip": "grad_clip max_grad_norm clip_norm gradient_clip",
    "data": "dataset data_name dataset_name",
    "data_dir": "dataset_dir data_path data_root root",
    "device": "gpu cuda",
    "epochs": "local_epochs n_epochs num_epochs local_ep local_iterations",
    "eval_every": "eval_interval test_every eval_freq",
    "lr": "learning_rate local_lr client_lr eta lr_local",
    "lr_decay": "learning_rate_decay lr_gamma",
    "max_length": "max_len seq_len sequence_length",
    "model": "net network arch architecture",
    "model_options": "model_args model_kwargs",
    "optimizer": "opt optim optimiser",
    "participation": "client_fraction frac fraction_fit sample_rate join_ratio participation_rate sample_fraction",
    "partition": "partitioning partitioner split_method",
    "pool": "server_data server_samples",
    "precision": "dtype mixed_precision autocast",
    "regions": "n_regions num_regions",
    "rounds": "n_rounds num_rounds global_rounds comm_rounds communication_rounds global_epochs",
    "seed": "random_seed random_state manual_seed",
    "test_fraction": "test_split test_size",
    "vocabulary": "vocab_size",
    "weight_decay": "wd l2 reg",
    "workers": "n_jobs num_workers n_workers jobs processes",
}
_SYNONYMS = {synonym: name for name, synonyms in _CALLED.items() for synonym in synonyms.split()}


def unknown_setting(name: str, known: Iterable[str], kind: str = "setting") -> SettingError:
    """The error for a name that is no setting, with what it was probably meant to be.

    >>> str(unknown_setting("learning_rate", ["lr", "rounds"]))
    "unknown setting 'learning_rate'; it is called 'lr' here"
    >>> str(unknown_setting("mu", ["lr", "rounds"]))
    "unknown setting 'mu'; it belongs to fedprox, moon; 'fedstill methods NAME' lists the settings of a method"
    >>> str(unknown_setting("lora", ["lr", "rounds"]))
    "unknown setting 'lora'; it is an option of the network distilbert: --set model_options.lora=VALUE"
    """
    known = list(known)
    synonym = _SYNONYMS.get(name.lower().replace("-", "_"))
    if synonym in known:
        return SettingError(f"unknown {kind} {name!r}; it is called {synonym!r} here")
    if owners := _owners(name):
        return SettingError(
            f"unknown {kind} {name!r}; it belongs to {', '.join(owners)}; 'fedstill methods NAME' lists the settings "
            "of a method"
        )
    if networks := _networks(name):
        return SettingError(
            f"unknown {kind} {name!r}; it is an option of the network {', '.join(networks)}: "
            f"--set model_options.{name}=VALUE"
        )
    error = unknown(kind, name, known)
    return (
        error
        if "did you mean" in str(error)
        else SettingError(f"unknown {kind} {name!r}; 'fedstill settings' lists all")
    )


def _owners(name: str) -> list[str]:
    """The methods and modifiers that have a setting of this name."""
    from fedstill.methods import registry  # only now: it is heavy, and the flags of commands come from this package

    found = [method for method in registry.names() if _has(method, name)]
    return found + [f"+{modifier}" for modifier in registry.modifiers() if _has(modifier, name)]


def _networks(name: str) -> list[str]:
    """The networks that have an option of this name."""
    from fedstill.models import registry

    return [network for network in registry.names() if name in registry.options(network)]


def _has(method: str, setting: str) -> bool:
    from fedstill.methods import registry

    try:
        return setting in registry.own_names(method)
    except SettingError:  # a package registers what cannot be loaded; that is said where it is used
        return False
