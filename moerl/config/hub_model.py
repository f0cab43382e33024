"""Section `model` of a configuration that starts from a model of the hub. Torch-free; runs in the command line."""

from __future__ import annotations

from collections.abc import Callable

from moerl.config.schema import ModelConfig
from moerl.machine.hub import HubModel, fetch_weights, hub_name, locate, notify
from moerl.machine.model_tensors import check_model


def with_hub_model(model: ModelConfig, given: object, known: ModelConfig | None = None) -> ModelConfig:
    """Returns the section `model` of a configuration with a directory as its path.

    Args:
        model: validated section.
        given: its path as the user wrote it.
        known: section of the run that goes on, which keeps its commit if the name is the same, whatever the name stands
            for by now; None for a new run.

    Raises:
        ConfigError: as `locate`.
    """
    if model.hub is not None and model.path is not None:  # stored by a run
        if model.path.is_dir():
            return model
        found = locate(model.hub, model.commit)
        notify(f"note: model.path: {model.path} is gone; {found}")
        return model.model_copy(update={"path": found.folder})
    name = hub_name(given) if isinstance(given, str) else None
    if name is None:
        return model
    if known is not None and known.hub == name:
        stored = {"path": known.path, "hub": known.hub, "commit": known.commit}
        return with_hub_model(model.model_copy(update=stored), given)
    found = locate(name)
    return model.model_copy(update={"path": found.folder.resolve(), "hub": name, "commit": found.commit})


def hub_model(model: ModelConfig) -> HubModel | None:
    """Returns the model of the hub that a configuration starts from; None if it starts from another one."""
    if model.hub is None or model.commit is None or model.path is None:
        return None
    return HubModel(model.hub, model.commit, model.path)


def show_model(model: ModelConfig, show: Callable[[str], None] = notify) -> None:
    """Shows, on standard error by default, the model of the hub that a configuration starts from, if there is one."""
    of_hub = hub_model(model)
    if of_hub is not None:
        show(str(of_hub))


def prepare_model(model: ModelConfig) -> None:
    """Fetches what is still missing of a model of the hub, and checks the directory of any.

    Raises:
        ConfigError: as `fetch_weights` and `check_model`.
    """
    of_hub = hub_model(model)
    if of_hub is not None:
        fetch_weights(of_hub)
    if model.path is not None:
        check_model(model.path)
