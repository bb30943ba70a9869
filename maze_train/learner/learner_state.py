"""State of a learner: all of it, or some of its components."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.errors import ConfigError
from maze_train.learner.accumulation import LossScaler
from maze_train.learner.modules import LearnerModules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.types import Tensor


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
