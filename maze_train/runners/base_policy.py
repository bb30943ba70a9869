"""Weights of an earlier policy as the beginning of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.training.policy_files import read_spaces, read_weights

if TYPE_CHECKING:
    from torch import nn

    from maze_train.types import Tensor

__all__ = ["take_over"]

KEY = "base_run"

POLICY_PARTS = ("normalizer", "trunk", "memory", "policy")
"""Parts of a model that make up its policy; all models name them alike."""


def take_over(directory: str, model: nn.Module, own_spaces: tuple[Any, Any]) -> list[str]:
    """Write the weights of a saved policy into a model.

    The policy has to fit entirely, with its statistics of observations. Other parts, such as a
    critic, are taken over where the saved model has the same, else they stay as they are.

    Args:
        directory: Directory of a run, or of one saved policy.
        model: What is to be trained; changed in place.
        own_spaces: Observation and action space of one environment.

    Returns:
        The parts that were taken over.

    Raises:
        ConfigError: If there is no policy, its spaces are others, or its networks do not fit.
    """
    place = Path(directory)
    if (place / "best").is_dir():
        place = place / "best"
    try:
        weights, spaces = read_weights(place), read_spaces(place)
    except RunDirectoryError as error:
        raise ConfigError(KEY, str(error), directory) from error
    for name, saved, own in zip(("observation", "action"), spaces, own_spaces, strict=True):
        if saved != own:
            problem = f"its policy has the {name} space {saved}, the environment has {own}"
            raise ConfigError(KEY, problem, directory)
    found, wanted = _by_part(weights), _by_part(model.state_dict())
    _check_policy(directory, found, wanted)
    taken = [part for part, tensors in wanted.items() if _fits(found.get(part, {}), tensors)]
    chosen = {name: value for part in taken for name, value in found[part].items()}
    model.load_state_dict({**model.state_dict(), **chosen})
    return taken


def _by_part(weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        parts.setdefault(name.partition(".")[0], {})[name] = value
    return parts


def _fits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    same_names = found.keys() == wanted.keys()
    return same_names and all(found[name].shape == wanted[name].shape for name in wanted)


def _check_policy(
    directory: str, found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]
) -> None:
    for part in POLICY_PARTS:
        saved, own = found.get(part, {}), wanted.get(part, {})
        if _fits(saved, own):
            continue
        differing = [
            f"{name}: {_shape(saved.get(name))} there, {_shape(own.get(name))} here"
            for name in sorted({*saved, *own})
            if _shape(saved.get(name)) != _shape(own.get(name))
        ]
        raise ConfigError(
            KEY,
            f"its policy does not fit the networks of this run ({'; '.join(differing[:3])}"
            f"{'; ...' if len(differing) > 3 else ''}): give this run the model settings in its "
            "config.yaml (model.hidden_sizes, model.activation, model.distributions, "
            "model.normalization.mode, ...)",
            directory,
        )


def _shape(value: Tensor | None) -> str:
    return "nothing" if value is None else str(list(value.shape))
