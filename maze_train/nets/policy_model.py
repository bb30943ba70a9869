"""Policy model without a critic, action masking, and builders from spaces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from gymnasium import spaces
from gymnasium.spaces import Dict
from torch import nn

from maze_train.core.errors import ConfigError, SpaceError, did_you_mean, nearest
from maze_train.core.targets import locate
from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.base import Distribution
from maze_train.distributions.categorical import Categorical, MultiCategorical, impossible_logit
from maze_train.distributions.mapping import KEY, distribution_for
from maze_train.nets.acting import DistributionPolicy
from maze_train.nets.blocks import MLP
from maze_train.nets.config import ModelConfig
from maze_train.nets.custom import build_own, wrapped
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.template import TemplateNet, resolve
from maze_train.spaces.describe import flat_space, is_mask_key
from maze_train.spaces.masks import MaskedPart, MaskLayout, mask_layout

if TYPE_CHECKING:
    from maze_train.nets.recurrent import RecurrentNetwork


class ActionMasking:
    """Sets the probability of illegal actions to 0 by replacing their logits.

    The replacement is finite (half of the minimum of the dtype), so gradients are never NaN.
    Log-probabilities, entropies and KL divergences refer to the distribution over the legal
    actions. Source: Huang and Ontañón (2022), arXiv:2006.14171, section 3.

    Args:
        distribution: Distribution over the whole action space.
        layout: Layout of the masks in the observations.

    Raises:
        ConfigError: If the distribution of a masked action component is not `categorical` or
            `multi_categorical`.
    """

    def __init__(self, distribution: Distribution, layout: MaskLayout) -> None:
        self._segments = tuple(_segments(distribution, layout))
        self._sizes: dict[str, int] = {}
        for part in layout.parts:
            self._sizes[part.leaf] = max(part.stop, self._sizes.get(part.leaf, 0))

    def apply(self, params: Tensor, obs: TensorTree) -> Tensor:
        """Replace the logits of illegal actions, differentiable.

        Args:
            params: Distribution parameters, [..., param_size].
            obs: Observations with masks, nonzero for legal actions, [..., *shape].

        Returns:
            Parameters, [..., param_size]; replaced logits have no gradient.
        """
        return torch.where(self._legal(params, obs), params, impossible_logit(params.dtype))

    def _legal(self, params: Tensor, obs: TensorTree) -> Tensor:
        """Return a mask of the parameters of legal actions, bool, [..., param_size]."""
        assert isinstance(obs, dict), "masks are entries of a Dict observation"
        batch = params.shape[:-1]
        masks = {k: obs[k].reshape((*batch, size)) != 0 for k, size in self._sizes.items()}
        kept = torch.ones((), dtype=torch.bool, device=params.device)
        pieces = [
            kept.expand((*batch, size)) if leaf is None else masks[leaf].narrow(-1, start, size)
            for size, leaf, start in self._segments
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


_Segment: TypeAlias = "tuple[int, str | None, int]"
"""Size of a parameter block, key of its mask (or None), and start index in the mask."""


def _segments(distribution: Distribution, layout: MaskLayout) -> Iterator[_Segment]:
    """Yield the segments of `params` in order."""
    masked = {part.part: part for part in layout.parts}
    for key, family in distribution.parts.items():
        if key in masked:
            _check_family(key, family, masked[key])
            yield family.param_size, masked[key].leaf, masked[key].start
        elif family.param_size > family.free_param_size:
            yield family.param_size - family.free_param_size, None, 0
    if distribution.free_param_size:
        yield distribution.free_param_size, None, 0


def _check_family(key: str, family: Distribution, part: MaskedPart) -> None:
    """Raise if a distribution family does not have one logit per action as parameters."""
    name = key or ("Discrete" if len(part.sizes) == 1 else "MultiDiscrete")
    is_fit = isinstance(family, (Categorical, MultiCategorical))
    if not is_fit or family.param_size != sum(part.sizes):
        raise ConfigError(
            f"{KEY}.{name}",
            f"the observation {part.leaf!r} masks the actions of this part, which requires "
            "categorical or multi_categorical: remove this setting, or the mask",
            type(family).__name__,
        )


POLICY_GAIN = 0.01
"""Gain of the orthogonal initialisation of the output layer of a policy."""


class Policy(nn.Module):
    """Maps observations to the parameters of an action distribution.

    Args:
        net: Maps observations (or features of a shared trunk) to
            `[..., param_size - free_param_size]`.
        distribution: The action distribution; defines the total number of parameters and the number
            of state-independent parameters.
    """

    def __init__(self, net: nn.Module, distribution: Distribution) -> None:
        super().__init__()
        self.net = net
        self.distribution = distribution
        self.free_params: nn.Parameter | None = None
        if distribution.free_param_size:
            self.free_params = nn.Parameter(distribution.initial_free_params())

    def forward(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        params: Tensor = self.net(obs)
        if self.free_params is None:
            return params
        free = self.free_params.expand(*params.shape[:-1], -1)
        return torch.cat([params, free], dim=-1)

    @property
    def has_free_params(self) -> bool:
        """Whether there are trainable state-independent parameters."""
        return self.free_params is not None and self.free_params.requires_grad

    def limit_free_params(self) -> None:
        """Clamp the state-independent parameters to the limits of the distribution."""
        if self.free_params is not None:
            self.distribution.limit_free_params(self.free_params.detach())


def input_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the input space of networks: a flat observation space without masks."""
    if not isinstance(space, Dict):
        return space
    parts = OrderedDict((k, leaf) for k, leaf in space.spaces.items() if not is_mask_key(k))
    if not parts:
        raise SpaceError(f"{space} has only masks: expected at least one other observation")
    return Dict(parts)


def critic_keys(config: ModelConfig, space: spaces.Space[Any]) -> tuple[str, ...]:
    """Return the observation keys of `critic_obs`, in the order of the space.

    Args:
        config: Model settings; only `critic_obs` is used.
        space: Result of `input_space`.

    Raises:
        ConfigError: If a key does not exist, or if all keys are hidden from the policy.
    """
    if not config.critic_obs:
        return ()
    known = list(space.spaces) if isinstance(space, Dict) else []
    found: set[str] = set()
    for name in config.critic_obs:
        own = {key for key in known if key == name or key.startswith(f"{name}/")}
        if not own:
            hint = did_you_mean(nearest(name, known, 1))
            problem = f"expected keys of the observation space, {known}{hint}"
            if not known:
                problem = "the observation space has no keys: remove this setting"
            raise ConfigError("model.critic_obs", problem, name)
        found |= own
    if len(found) == len(known):
        problem = f"no observation is left for the policy; expected a proper subset of {known}"
        raise ConfigError("model.critic_obs", problem, config.critic_obs)
    return tuple(key for key in known if key in found)


def policy_space(config: ModelConfig, space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the input space of the policy: `input_space` without `critic_keys`."""
    hidden = critic_keys(config, space)
    if not hidden:
        return space
    assert isinstance(space, Dict)
    return Dict(OrderedDict((k, leaf) for k, leaf in space.spaces.items() if k not in hidden))


def without_critic(config: ModelConfig) -> ModelConfig:
    """Return the settings without critic settings."""
    return replace(
        config, centralized_critic=None, critic_obs=None, critic=None, critic_hidden_sizes=None
    )


def build_normalizer(config: ModelConfig, space: spaces.Space[Any]) -> ObservationNormalizer | None:
    """Build the configured normalizer; None if there is nothing to normalize."""
    if config.normalization.mode == "none":
        return None
    normalizer = ObservationNormalizer(space, config.normalization)
    return normalizer if normalizer.keys else None


def build_masking(distribution: Distribution, masks: MaskLayout | None) -> ActionMasking | None:
    """Build the action masking; None if there are no masks."""
    if masks is None:
        return None
    return ActionMasking(distribution, masks)


def readable(
    obs: TensorTree,
    normalizer: ObservationNormalizer | None,
    has_masks: bool,
    hidden: Collection[str] = (),
) -> TensorTree:
    """Return network inputs: normalized observations, excluding masks and hidden keys."""
    if has_masks or hidden:
        assert isinstance(obs, dict)
        obs = {k: leaf for k, leaf in obs.items() if not (is_mask_key(k) or k in hidden)}
    return obs if normalizer is None else normalizer(obs)


def build_network(
    config: ModelConfig,
    role: str,
    space: spaces.Space[Any],
    hidden_sizes: list[int],
    output_size: int,
    gain: float,
) -> nn.Module:
    """Build the configured custom network of a role (policy, critic, trunk), or a template."""
    node: Mapping[str, Any] | None = config.value_of(role)
    if node is None:
        if role == "trunk":
            return TemplateNet(space, config, hidden_sizes)
        return TemplateNet(space, config, hidden_sizes, output_size, gain)
    net: nn.Module = build_own(node, f"model.{role}", space, output_size)
    return net


CRITIC_SETTINGS = (
    *("critic", "critic_hidden_sizes", "centralized_critic", "value_transform", "value_support"),
)
"""Names of the model settings that affect only the critic."""


class PolicyModel(DistributionPolicy):
    """Policy preceded by optional hidden and recurrent layers.

    Observations pass through normalizer, trunk and recurrent layers, if present, to the policy.

    Args:
        policy: The policy; takes features if there is a trunk.
        trunk: Hidden layers before the recurrent layers and the policy, or None.
        rnn: Recurrent layers after the trunk, or None.
        normalizer: Observation normalizer, or None.
        masking: Action masking, or None.
        critic_keys: Observation keys that the policy does not use; may be missing in observations.
    """

    def __init__(
        self,
        policy: Policy,
        trunk: nn.Module | None = None,
        *,
        rnn: RecurrentNetwork | None = None,
        normalizer: ObservationNormalizer | None = None,
        masking: ActionMasking | None = None,
        critic_keys: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        # The order of submodules determines saved weights and flat parameter vectors.
        self.normalizer = normalizer
        self.trunk = trunk
        self.rnn = rnn
        self.policy = policy
        self.masking = masking
        self.critic_keys = critic_keys

    @property
    def distribution(self) -> Distribution:
        """The action distribution."""
        return self.policy.distribution

    @property
    def around(self) -> dict[str, Any]:
        """All submodules except the policy, as constructor arguments."""
        parts = {"trunk": self.trunk, "rnn": self.rnn, "normalizer": self.normalizer}
        return {**parts, "masking": self.masking, "critic_keys": self.critic_keys}

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state per environment; 0: not recurrent."""
        return 0 if self.rnn is None else self.rnn.state_size

    def forward(self, obs: TensorTree) -> Tensor:
        """See `policy_params`."""
        return self.policy_params(obs)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`, of a feedforward model."""
        assert self.rnn is None, "this model is recurrent: call policy_step"
        return self._masked(self.policy(self._trunk_features(obs)), obs)

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return distribution parameters `[n, param_size]` and the state `[n, S]` after `obs`."""
        if self.rnn is None:
            return self.policy_params(obs), state
        features, state = self._remembering(obs, state)
        return self._masked(self.policy(features), obs), state

    def _remembering(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return recurrent features `[n, H]`, and the recurrent state after the observations."""
        assert self.rnn is not None, "this model is not recurrent: call policy_params"
        return self.rnn.step(self._trunk_features(obs), state)

    def _trunk_features(self, obs: TensorTree) -> Any:
        inputs = self.inputs(obs)
        return inputs if self.trunk is None else self.trunk(inputs)

    def inputs(self, obs: TensorTree) -> TensorTree:
        """Return the policy inputs: normalized observations, excluding masks and critic keys."""
        return readable(obs, self.normalizer, self.masking is not None, self.critic_keys)

    def _masked(self, params: Tensor, obs: TensorTree) -> Tensor:
        return params if self.masking is None else self.masking.apply(params, obs)


def build_policy(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    *,
    policy_wrapper: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a policy without a critic.

    An actor-critic built with the same settings and seed has an identical policy. The policy
    weights of both models are compatible.

    Args:
        config: Model settings without critic settings.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is not affected.
        policy_wrapper: Wrapper for the policy, such as rules for some observations:
            `{_target_: my_package.MyWrapper, key: value}`, called with the `PolicyModel`. The
            wrapper must return a module with the attribute `distribution` and the method
            `policy_params(obs)`, or, if recurrent, with the method `policy_step(obs, state)` and
            the attribute `state_size` > 0. None: no wrapper.

    Returns:
        A `PolicyModel`, or the result of the wrapper, which is checked with a forward pass. The
        returned module is in evaluation mode.

    Raises:
        ConfigError: If a critic setting is set, or a custom network or the wrapper cannot be found,
            rejects its arguments, fails, or has a wrong output.
        SpaceError: If a space is not supported by any network or distribution.
    """
    for key in CRITIC_SETTINGS:
        value = config.value_of(key)
        if value is not None:
            raise ConfigError(f"model.{key}", "there is no critic: remove this setting", value)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = compose_policy(config, observation_space, action_space).eval()
        if policy_wrapper is None:
            return model
        with_wrapper: nn.Module = wrapped(policy_wrapper, model, flat_space(observation_space))
        return with_wrapper


def compose_policy(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
) -> PolicyModel:
    """Build the policy. Initial weights are sampled from the global generator.

    Args:
        config: Model settings; critic settings only determine whether there is a trunk.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.

    Raises:
        ConfigError: If a custom network cannot be found, rejects its arguments, or has a wrong
            output.
        SpaceError: If a space is not supported by any network or distribution.
    """
    masks = mask_layout(observation_space, action_space)
    full = input_space(flat_space(observation_space))
    hidden, space = critic_keys(config, full), policy_space(config, full)
    config = resolve(without_critic(config) if hidden else config, space)
    distribution = distribution_for(action_space, config.distributions)
    masking = build_masking(distribution, masks)
    normalizer = build_normalizer(config, full)
    net_size = distribution.param_size - distribution.free_param_size
    sizes = config.hidden_sizes or []
    trunk, rnn = None, None
    if config.shared_trunk:
        trunk = build_network(config, "trunk", space, sizes, sizes[-1], 0.0)
        if config.rnn is not None:
            layers: type[RecurrentNetwork] = locate(config.rnn.network_class)
            rnn = layers(sizes[-1], config.rnn, bool(config.orthogonal_init))
        net: nn.Module = head_of_trunk(config, net_size, POLICY_GAIN)
    else:
        net = build_network(config, "policy", space, sizes, net_size, POLICY_GAIN)
    policy = Policy(net, distribution)
    return PolicyModel(
        policy, trunk, rnn=rnn, normalizer=normalizer, masking=masking, critic_keys=hidden
    )


def head_of_trunk(config: ModelConfig, output_size: int, gain: float) -> MLP:
    """Build a linear output layer for the features of a trunk or of recurrent layers.

    Args:
        config: Resolved settings of a model with a trunk.
        output_size: Units of the layer.
        gain: Gain of the orthogonal initialisation.
    """
    assert config.hidden_sizes, "a trunk has a layer"
    return MLP(
        config.hidden_sizes[-1] if config.rnn is None else config.rnn.size,
        [],
        str(config.activation),
        output_size=output_size,
        orthogonal=bool(config.orthogonal_init),
        output_gain=gain,
    )
