"""State of a learner: all of it, or some of its components."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maze_train.errors import ConfigError
from maze_train.files import atomic_write
from maze_train.learner.accumulation import LossScaler
from maze_train.learner.modules import LearnerModules
from maze_train.targets import locate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from typing_extensions import Self

    from maze_train.types import Tensor


# Found where a state is written or read.
STATE_FILES = "maze_train.training.state_files"

WITH_PARTS = ("modules", "optimizers")
"""Components that have parts."""


class LearnerState(LearnerModules):
    """Modules and optimizers whose state is read and written.

    Args:
        modules: The independently trained modules by id; one module alone gets the id `default`.
        config: Settings, see `Learner`.
        device: Where the modules live.
        seed: Seed of the learner's own random numbers.
    """

    def __init__(
        self, modules: Any, config: Any, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        super().__init__(modules, config, device)
        self.loss_scaler = LossScaler() if self.settings.autocast == "float16" else None

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return {
            module_id: {key: value.detach().clone() for key, value in module.state_dict().items()}
            for module_id, module in self.modules.items()
        }

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights, as `get_weights` gives them, into the modules, in place.

        Raises:
            ConfigError: If there is no such module.
        """
        for module_id, state in weights.items():
            self._known(module_id).load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizers, random generator and counters."""
        state = {
            "modules": self.get_weights(),
            "optimizers": {"/".join(key): o.state_dict() for key, o in self.optimizers.items()},
            "generator": self.generator.get_state(),
            "weights_seq_no": self.weights_seq_no,
        }
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            ConfigError: If it is the state of other modules.
        """
        if state["modules"].keys() != self.modules.keys():
            raise ConfigError(
                "module_id",
                f"the state is one of other modules than {', '.join(self.modules)}: add_module "
                "and remove_module before it is loaded",
                ", ".join(state["modules"]),
            )
        self.set_weights(state["modules"])
        for key, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"]["/".join(key)])
        self.generator.set_state(state["generator"])
        self.weights_seq_no = state["weights_seq_no"]
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state["loss_scaler"])

    def get_state(
        self,
        components: Collection[str] | None = None,
        *,
        not_components: Collection[str] = (),
    ) -> dict[str, Any]:
        """State of some components, in the form of `state_dict`.

        Components are the keys of `state_dict`, of which `modules` and `optimizers` have parts:
        `modules/<id>`, `optimizers/<id>` and `optimizers/<id>/<name>`.

        Args:
            components: Components that are wanted, each with its parts; None: all.
            not_components: Components that are left out, each with its parts.

        Raises:
            ConfigError: If there is no such component.
        """
        return select(self.state_dict(), components, not_components)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over the state of some components; the others stay as they are.

        Args:
            state: Result of `get_state`, or a part of it.

        Raises:
            ConfigError: If the learner has no such component.
        """
        current = self.state_dict()
        known, given = parts_of(current), parts_of(state)
        for name in given:
            _check_known("component", name, known)
        for key, value in state.items():
            current[key] = {**current[key], **value} if key in WITH_PARTS else value
        self.load_state_dict(current)

    def save_to_path(
        self,
        path: str | Path,
        components: Collection[str] | None = None,
        *,
        not_components: Collection[str] = (),
    ) -> None:
        """Write the state of components to one file that can not run code, whole or not at all.

        Args:
            path: The file; its directory exists.
            components: See `get_state`.
            not_components: See `get_state`.
        """
        data = locate(STATE_FILES + ".dumps")(
            self.get_state(components, not_components=not_components)
        )
        with atomic_write(Path(path)) as file:
            file.write(data)

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Take over the state of a file of `save_to_path`.

        Args:
            path: The file.
            component: The only component that is taken over, see `get_state`; None: all that the
                file has.

        Raises:
            ConfigError: If the file has no such component, or the learner has none.
            RunDirectoryError: If the file is damaged.
        """
        state = locate(STATE_FILES + ".loads")(Path(path).read_bytes(), path)
        self.set_state(select(state, None if component is None else [component]))

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """A new learner with the state of a file of `save_to_path`.

        Args:
            path: The file.
            *args: Arguments of the constructor, such as modules and settings: files hold none.
            **kwargs: The same by name.
        """
        learner = cls(*args, **kwargs)
        learner.restore_from_path(path)
        return learner


def parts_of(state: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Names of the components of a state, each with its keys."""
    parts: dict[str, tuple[str, str | None]] = {}
    for key, value in state.items():
        if key in WITH_PARTS:
            parts.update({f"{key}/{part}": (key, part) for part in value})
        else:
            parts[key] = (key, None)
    return parts


def select(
    state: Mapping[str, Any],
    components: Collection[str] | None,
    not_components: Collection[str] = (),
) -> dict[str, Any]:
    """Some components of a state, see `LearnerState.get_state`."""
    parts = parts_of(state)
    for name in (*(components or ()), *not_components):
        _check_known("components", name, parts)
    chosen: dict[str, Any] = {}
    for name, (key, part) in parts.items():
        wanted = components is None or any(_is_within(name, other) for other in components)
        if not wanted or any(_is_within(name, other) for other in not_components):
            continue
        if part is None:
            chosen[key] = state[key]
        else:
            chosen.setdefault(key, {})[part] = state[key][part]
    return chosen


def _is_within(name: str, component: str) -> bool:
    return name == component or name.startswith(f"{component}/")


def _check_known(key: str, name: str, parts: Mapping[str, Any]) -> None:
    if not any(_is_within(part, name) for part in parts):
        known = ", ".join(parts)
        raise ConfigError(key, f"no such component; there are: {known}", name)
