"""What a policy does with one batch of observations, as a function of tensors alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maze_train.errors import ConfigError
from maze_train.rollout.acting import Actor, chosen_actions
from maze_train.rollout.initial_policies import FixedPolicy
from maze_train.runners.base_policy import CRITIC_PARTS
from maze_train.spaces.agent_trees import part_of, with_name
from maze_train.spaces.agents import ACTS, AGENTS, agent_spaces
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import zeros_for
from maze_train.training.models import modules_of
from maze_train.types import as_tree, leaves_by_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.training.policy_files import TrainedPolicy
    from maze_train.types import Tensor


OBS, STATE = "obs", "state"
ACTION, PARAMS, NEXT_STATE = "action", "params", "next_state"
"""Names of inputs and outputs; Dict and Tuple spaces have one for each part, such as `obs/goal`."""


TARGET_POLICY = "target_policy"
"""Part of a model that serves learning alone, as critics do."""


class PolicyStep(nn.Module):
    """The most likely actions of a policy, from tensors by name to tensors by name.

    - `obs`: observations as the environment gives them, in its data types, `[n, ...]`. Of several
      agents those of each, `obs/agents/<name>`, and, with a memory, `obs/acts`.
    - `state`: the memory `[n, S]`, zeros where an episode begins; of policies that have one.
    - `action`: actions as the environment takes them.
    - `params`: parameters of their distribution, `[n, param_size]` for each part.
    - `next_state`: the memory after the observations, the `state` of the next call.

    Args:
        policy: The policy; networks are copied.

    Attributes:
        keys: Leaves of the observations that are read; the key of a lone one is empty.
        state_size: S; 0: there is no memory.

    Raises:
        ConfigError: If a policy has no networks.
    """

    def __init__(self, policy: TrainedPolicy) -> None:
        super().__init__()
        _check_networks(policy.model)
        model: Any = copy.deepcopy(policy.model)
        self.model = model.cpu().eval().requires_grad_(False)
        for module in modules_of(self.model).values():
            for name in (*CRITIC_PARTS, TARGET_POLICY):
                module._modules.pop(name, None)
            # Numbers such as the share of random actions: they are constants from now on.
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not buffer.dim():
                    delattr(module, name)
                    setattr(module, name, buffer.item())
        space = flat_space(policy.observation_space)
        zeros: dict[str, Tensor] = leaves_by_key(zeros_for(space, (1,)))
        self._family: Any = model.distribution
        self.state_size = int(getattr(model, "state_size", 0))
        self.keys = list(zeros)
        if agent_spaces(policy.observation_space, policy.action_space) is not None:
            read = (AGENTS, ACTS) if self.state_size else (AGENTS,)
            self.keys = [key for key in zeros if key.partition("/")[0] in read]
        self._dtypes = {key: zeros[key].dtype for key in self.keys}
        self._is_single = "" in zeros

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name."""
        leaves = leaves_by_key(part_of(inputs, OBS))
        obs = {key: leaves[key].to(dtype) for key, dtype in self._dtypes.items()}
        actor = Actor(self.model, 0)
        actor.hidden_state = inputs.get(STATE, actor.hidden_state)
        params = actor.params(as_tree(obs, has_keys=not self._is_single))
        family = self._family
        actions = family.to_env(chosen_actions(family, params, None, deterministic=True))
        parts = dict(zip(family.parts, family.split(params), strict=True))
        outputs = {**with_name(ACTION, actions), **with_name(PARAMS, parts.get("", parts))}
        if self.state_size:
            outputs[NEXT_STATE] = actor.hidden_state
        return outputs

    @property
    def families(self) -> dict[str, str]:
        """Name of the distribution of each part of an action."""
        return {key: type(part).__name__ for key, part in self._family.parts.items()}

    def inputs(self, leaves: Mapping[str, Any], state: Tensor) -> dict[str, Tensor]:
        """Inputs by name of observations by leaf, arrays `[n, ...]`, and of a memory `[n, S]`."""
        tensors = {key: torch.from_numpy(leaves[key]) for key in self.keys}
        found = with_name(OBS, as_tree(tensors, has_keys=not self._is_single))
        return {**found, STATE: state} if self.state_size else found


def _check_networks(model: Any) -> None:
    """Refuse policies that are no networks: random ones, and code of users."""
    if not isinstance(model, nn.Module):
        raise ConfigError("policy", "has no networks, which alone can be exported", type(model))
    for name, module in modules_of(model).items():
        if isinstance(module, FixedPolicy):
            problem = "acts at random, or by code of its own, which can not be exported"
            remedy = "name one of the agents with networks, agent=<name>"
            raise ConfigError(f"policies.{name}.source", f"{problem}; {remedy}")
