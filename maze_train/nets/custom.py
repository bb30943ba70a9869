"""Construction and checks of custom networks, policy wrappers and value transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET, InlineObject, build_target, member_of
from maze_train.core.types import Tensor
from maze_train.distributions.base import Distribution
from maze_train.functional.value_transforms import ValueTransform
from maze_train.nets.acting import acting
from maze_train.spaces.describe import is_mask_key
from maze_train.spaces.tensors import sampled_for

ROWS = 2
"""Number of observations in the test forward pass of a custom network, or one more if a network has
as many outputs, so that transposed outputs are noticed."""

WRAPPER_KEY = "algorithm.policy_wrapper"
TRANSFORM_KEY = "model.value_transform"
"""Keys of the settings for the policy wrapper and the value transform."""

SAMPLES = (-10.0, -1.0, 0.0, 1.0, 10.0)
"""Returns for testing a value transform."""
TOLERANCE = 1e-3


def build_own(
    node: Mapping[str, Any],
    key: str,
    space: spaces.Space[Any],
    output_size: int,
    action_size: int | None = None,
) -> nn.Module:
    """Build a custom network and check its output shape with a forward pass.

    Args:
        node: Target of the network, see `build_target`.
        key: Configuration key of the network.
        space: Flat observation space, without masks.
        output_size: Number of outputs.
        action_size: Number of action features in the input of the network; None: observations only.

    Raises:
        ConfigError: If the network cannot be built, fails, or has a wrong output.
    """
    sizes = {"output_size": output_size}
    rows = ROWS + (output_size == ROWS)
    inputs, described = [sampled_for(space, rows)], f"observations of {space}"
    if action_size is not None:
        sizes["action_size"] = action_size
        inputs.append(torch.zeros(rows, action_size))
        described += f" and actions [{rows}, {action_size}]"
    net: nn.Module = build_target(node, key=key, kind=nn.Module, observation_space=space, **sizes)
    if isinstance(node[TARGET], InlineObject) and net is node[TARGET].value:
        net = copy.deepcopy(net)  # The same instance may be configured for several networks.
    net.eval()
    with torch.no_grad():
        try:
            output = net(*inputs)
        except Exception as error:
            raise ConfigError(key, f"a forward pass on {described} failed: {error}") from error
    if not isinstance(output, torch.Tensor) or output.shape != (rows, output_size):
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ConfigError(
            key, f"expected outputs of shape [batch, {output_size}] (argument output_size)", got
        )
    return net


def wrapped(node: Mapping[str, Any], model: nn.Module, space: spaces.Space[Any]) -> nn.Module:
    """Build the wrapper of a policy, and check the wrapper's outputs for sample observations."""
    if TARGET not in node:
        raise ConfigError(WRAPPER_KEY, "expected a mapping with the key _target_, or null", node)
    try:
        policy = build_target(node, model, key=WRAPPER_KEY, kind=nn.Module)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"calling {node[TARGET]} failed: {type(error).__name__}: {error}"
        raise ConfigError(WRAPPER_KEY, problem) from error
    assert isinstance(policy, nn.Module)
    distribution = member_of(policy, "distribution")
    if not isinstance(distribution, Distribution):
        raise ConfigError(
            WRAPPER_KEY,
            "expected a module with the attribute distribution of the wrapped policy",
            type(distribution).__name__,
        )
    _try_out(policy.eval(), distribution.param_size, space)
    return policy


def _try_out(model: Any, param_size: int, space: spaces.Space[Any]) -> None:
    """Raise if a forward pass of a model on sample observations fails."""
    rows = ROWS + (param_size == ROWS)
    obs = sampled_for(space, rows)
    if isinstance(obs, dict):
        # A sampled mask could contain no legal action.
        obs = {k: torch.ones_like(leaf) if is_mask_key(k) else leaf for k, leaf in obs.items()}
    method, wanted = "policy_params", [[rows, param_size]]
    expected = f"expected distribution parameters of shape [batch, {param_size}]"
    try:
        state_size = acting(model).state_size
        with torch.no_grad():
            if state_size > 0:
                method = "policy_step"
                wanted.append([rows, state_size])
                expected += f" and a recurrent state of shape [batch, {state_size}]"
                outputs = model.policy_step(obs, torch.zeros(rows, state_size))
            else:
                outputs = model.policy_params(obs)
    except Exception as error:
        problem = f"{method} on observations of {space} failed: {type(error).__name__}: {error}"
        raise ConfigError(WRAPPER_KEY, problem) from error
    got = _shapes(outputs)
    if got != (wanted if state_size > 0 else wanted[0]):
        raise ConfigError(WRAPPER_KEY, f"{expected} from {method}", got)


def _shapes(outputs: object) -> list[Any] | str:
    """Return the shape of a tensor, shapes of a tuple of tensors, or the type of other objects."""
    if isinstance(outputs, tuple):
        return [_shapes(output) for output in outputs]
    return list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__


def build_value_transform(node: Mapping[str, Any]) -> ValueTransform:
    """Build a value transform, and test the transform with a few returns.

    Raises:
        ConfigError: If the transform cannot be built, is not increasing, or has a wrong inverse.
    """
    transform: ValueTransform = build_target(node, key=TRANSFORM_KEY)
    forth = member_of(transform, "transform_value")
    back = member_of(transform, "transform_value_inv")
    if not callable(forth) or not callable(back):
        raise ConfigError(
            TRANSFORM_KEY,
            "expected an object with the methods transform_value and transform_value_inv, such as "
            f"a subclass of maze_train.ValueTransform; got a {type(transform).__name__}",
        )
    returns = torch.tensor(SAMPLES)
    values = _mapped("transform_value", forth, returns)
    if not bool((values.diff() > 0).all()):
        problem = f"transform_value must be increasing; it maps {list(SAMPLES)} to"
        raise ConfigError(TRANSFORM_KEY, f"{problem} {values.tolist()}")
    again = _mapped("transform_value_inv", back, values)
    if not torch.allclose(again, returns, TOLERANCE, TOLERANCE):
        problem = "transform_value_inv must be the inverse of transform_value; it maps the returns"
        raise ConfigError(TRANSFORM_KEY, f"{problem} {list(SAMPLES)} to {again.tolist()}")
    return transform


def _mapped(name: str, method: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply a transform or its inverse; raise if the result has a wrong shape or wrong values."""
    try:
        result = method(values)
    except Exception as error:
        problem = f"{name}({values.tolist()}) raised {type(error).__name__}: {error}"
        raise ConfigError(TRANSFORM_KEY, problem) from error
    is_alike = isinstance(result, torch.Tensor) and result.shape == values.shape
    if not is_alike or not bool(result.isfinite().all()):
        shown = result.tolist() if is_alike else repr(result)
        problem = f"{name} must return a tensor of the same shape with finite values; it maps"
        raise ConfigError(TRANSFORM_KEY, f"{problem} {values.tolist()} to {shown}")
    return result
