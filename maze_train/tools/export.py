"""Export of a policy to a file, after comparing the outputs of policy and file."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Box
from torch import nn

from maze_train.collect.episode_pool import RolloutGenerator
from maze_train.collect.fixed_policies import FixedPolicy
from maze_train.config.commands import ExportConfig
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY
from maze_train.core.checks import absolute_path, check_one_of
from maze_train.core.errors import ConfigError, ExportError, MazeTrainError
from maze_train.core.files import atomic_write, versions, writable
from maze_train.core.notices import warn
from maze_train.core.report import field_lines
from maze_train.core.targets import import_extra
from maze_train.core.text import json_text
from maze_train.core.types import Array, Tensor, as_tree, leaves_by_key
from maze_train.data.trajectories import Trajectory
from maze_train.nets.acting import acting
from maze_train.nets.policy_model import PolicyModel
from maze_train.run.base_policy import CRITIC_PARTS
from maze_train.run.saved_policies import read_saved_policy
from maze_train.spaces.agents import ACTS, AGENTS, agent_spaces
from maze_train.spaces.describe import (
    flat_space,
    flat_spaces,
    flatten_value,
    space_to_dict,
    unflatten_value,
)
from maze_train.spaces.masks import mask_layout
from maze_train.spaces.tensors import part_of, with_name, zeros_for
from maze_train.training.models import modules_of
from maze_train.training.policy_files import TrainedPolicy

Inputs: TypeAlias = "dict[str, Tensor]"
Function: TypeAlias = "Callable[[Inputs], dict[str, Array]]"

DESCRIPTION = "maze_train.json"
"""Name of the JSON description: ONNX metadata entry, or extra file in the archive."""

PURPOSE = "format=onnx"


class Format(NamedTuple):
    """An export format."""

    suffix: str
    """File name extension."""

    write: Callable[[PolicyStep, Inputs, str], bytes]
    """Converts a policy, example inputs and a JSON description to the content of the file."""

    load: Callable[[bytes], Function]
    """Returns a function that runs the content of a file."""


def write_onnx(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """Convert a policy to ONNX.

    Raises:
        ExportError: If the policy cannot be exported.
        MissingExtraError: If a package is missing.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "onnx", PURPOSE)
    program = recorded(step, inputs)
    with torch.no_grad():
        outputs = list(step(inputs))
    with quiet("the policy cannot be converted to ONNX"):
        program = program.run_decompositions({torch.ops.aten.softplus.default: _softplus})
        found = torch.onnx.export(
            program,
            dynamic_shapes=any_number(inputs),
            input_names=list(inputs),
            output_names=outputs,
            dynamo=True,
            verbose=False,
        )
        assert found is not None, "dynamo=True returns a program"
        found.model.metadata_props[DESCRIPTION] = description
        content: bytes = found.model_proto.SerializeToString()
    return content


def load_onnx(content: bytes) -> Function:
    """Return a function that runs the policy with onnxruntime."""
    runtime = import_extra("onnxruntime", "onnx", PURPOSE)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Inputs) -> dict[str, Array]:
        arrays = {key: value.numpy() for key, value in inputs.items()}
        return dict(zip(names, session.run(names, arrays), strict=True))

    return run


def write_torch_export(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """Convert a policy to a `torch.export` archive."""
    buffer, program = io.BytesIO(), recorded(step, inputs)
    with quiet("PyTorch cannot write the policy"):
        torch.export.save(program, buffer, extra_files={DESCRIPTION: description})
    return buffer.getvalue()


def load_torch_export(content: bytes) -> Function:
    """Return a function that runs the policy with PyTorch."""
    with quiet("PyTorch cannot read the policy"):
        module = torch.export.load(io.BytesIO(content)).module()

    def run(inputs: Inputs) -> dict[str, Array]:
        with torch.no_grad():
            return {name: output.numpy() for name, output in module(inputs).items()}

    return run


def recorded(step: PolicyStep, inputs: Inputs) -> torch.export.ExportedProgram:
    """Trace a policy to an `ExportedProgram` with dynamic batch size."""
    with quiet("torch.export cannot trace the policy"), torch.no_grad():
        return torch.export.export(step, (inputs,), dynamic_shapes=any_number(inputs), strict=False)


def any_number(inputs: Inputs) -> tuple[dict[str, dict[int, object]]]:
    """Mark the first dimension of all inputs as dynamic."""
    n = torch.export.Dim("n")
    return ({name: {0: n} for name in inputs},)


@contextmanager
def quiet(problem: str) -> Iterator[None]:
    """Suppress warnings and logs of PyTorch, and convert its exceptions to ExportError.

    Raises:
        ExportError: If the block raises an exception.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = f"{problem}: {type(error).__name__}: {lines[0]}"
        remedy = "custom networks must not have control flow that depends on tensor values"
        raise ExportError(f"{found}; {remedy}, or try another format") from error
    finally:
        logging.disable(before)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Compute log(1 + exp(β x)) / β; onnxruntime does not support Softplus in float64."""
    scaled = x * beta
    return (scaled.clamp(min=0.0) + (-scaled.abs()).exp().log1p()) / beta


FORMATS = {
    "onnx": Format(".onnx", write_onnx, load_onnx),
    "torch_export": Format(".pt2", write_torch_export, load_torch_export),
}


OBS, STATE = "obs", "state"
ACTION, PARAMS, NEXT_STATE = "action", "params", "next_state"
"""Names of inputs and outputs. Dict and Tuple spaces have one name per leaf, like `obs/goal`."""


TARGET_POLICY = "target_policy"
"""Attribute of models for modules only used in training, such as critics."""


class PolicyStep(nn.Module):
    """Module that maps named tensors to the most likely actions of a policy.

    Inputs: `obs`, raw observations `[n, ...]` with the dtypes of the environment; for recurrent
    policies also `state`, the recurrent state `[n, S]` (zeros at the start of an episode). In
    multi-agent environments, `obs` is replaced by `obs/agents/<name>` and, for recurrent policies,
    `obs/acts`. Outputs: `action` (environment actions), `params` (`[n, param_size]`, the
    distribution parameters of each action component) and `next_state` (`state` of the next call).

    Args:
        policy: The policy; its networks are copied.

    Attributes: `keys`, the observation leaves used as inputs (a single leaf has an empty key);
        `state_size`, S (0 if not recurrent).

    Raises:
        ConfigError: If a policy has no networks.
    """

    def __init__(self, policy: TrainedPolicy) -> None:
        super().__init__()
        _check_networks(policy.model)
        model = copy.deepcopy(policy.model)
        self.model = acting(model.cpu().eval().requires_grad_(False))
        for module in modules_of(model).values():
            for name in (*CRITIC_PARTS, TARGET_POLICY):
                module._modules.pop(name, None)
            # Convert values such as the epsilon of DQN to constants.
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not buffer.dim():
                    delattr(module, name)
                    setattr(module, name, buffer.item())
        space = flat_space(policy.observation_space)
        zeros: dict[str, Tensor] = leaves_by_key(zeros_for(space, (1,)))
        self.state_size = self.model.state_size
        hidden = model.critic_keys if isinstance(model, PolicyModel) else ()
        self.keys = [key for key in zeros if key not in hidden]
        if agent_spaces(policy.observation_space, policy.action_space) is not None:
            read = (AGENTS, ACTS) if self.state_size else (AGENTS,)
            self.keys = [key for key in zeros if key.partition("/")[0] in read]
        self._dtypes = {key: zeros[key].dtype for key in self.keys}
        self._is_single = "" in zeros

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the outputs by name."""
        leaves = leaves_by_key(part_of(inputs, OBS))
        obs = {key: leaves[key].to(dtype) for key, dtype in self._dtypes.items()}
        state = inputs.get(STATE, torch.zeros(next(iter(obs.values())).shape[0], 0))
        acted = self.model.act(as_tree(obs, has_keys=not self._is_single), state, None, True)
        parts = {key: own for key, (_, own) in self.model.parts(acted.params).items()}
        action, params = with_name(ACTION, acted.env_actions), parts.get("", parts)
        outputs = {**action, **with_name(PARAMS, params)}
        if self.state_size:
            outputs[NEXT_STATE] = acted.hidden_state
        return outputs

    @property
    def families(self) -> dict[str, str]:
        """Name of the distribution of each action component."""
        zeros = torch.zeros(1, self.model.param_size)
        return {key: type(part).__name__ for key, (part, _) in self.model.parts(zeros).items()}

    def inputs(self, leaves: Mapping[str, Any], state: Tensor) -> dict[str, Tensor]:
        """Return inputs by name from observation leaves `[n, ...]` and hidden state `[n, S]`."""
        tensors = {key: torch.from_numpy(leaves[key]) for key in self.keys}
        found = with_name(OBS, as_tree(tensors, has_keys=not self._is_single))
        return {**found, STATE: state} if self.state_size else found


def _check_networks(model: object) -> None:
    """Raise ConfigError for policies without networks: random and custom policies."""
    if not isinstance(model, nn.Module):
        raise ConfigError("policy", "has no networks; only networks can be exported", type(model))
    for name, module in modules_of(model).items():
        if isinstance(module, FixedPolicy):
            problem = "is random or custom code and cannot be exported"
            remedy = "select an agent with networks, agent=<name>"
            raise ConfigError(f"policies.{name}.source", f"{problem}; {remedy}")


BATCHES = ((1, 8), (31, 32))
"""Batch sizes and step counts for the comparison."""

OBSERVATIONS = sum(n * steps for n, steps in BATCHES)

EPISODES, STEPS = 4, 250
"""Number of parallel episodes to collect observations, and maximum episode length."""

TOLERANCE = 1e-4
"""Maximum difference of an output x in units of max(1, |x|), due to rounding."""

MAX_OTHER_CHOICES = 5
"""Maximum number of observations with a different discrete action, due to ties."""


class Differences(NamedTuple):
    """Differences between the outputs of a file and a policy."""

    largest: float
    """Largest difference of an output x, in units of max(1, |x|)."""

    other_choices: int
    """Number of observations with a different discrete action."""


def played_observations(env: Any, policy: object) -> dict[str, Array]:
    """Collect observations from episodes with sampled actions, by leaf, `[1000, ...]`.

    Raises:
        ConfigError: If the spaces of policy and environment differ.
        EnvError: If the environment cannot be built, or fails.
    """
    episodes: list[Trajectory] = []
    with RolloutGenerator(
        env, policy, deterministic=False, concurrency=EPISODES, max_episode_steps=STEPS
    ) as generator:
        while sum(episode.num_steps for episode in episodes) < OBSERVATIONS:
            episodes += generator.rollout(EPISODES)
    columns = [leaves_by_key(episode.obs) for episode in episodes]
    return {key: np.concatenate([own[key] for own in columns])[:OBSERVATIONS] for key in columns[0]}


def observations_of_agent(
    observations: Mapping[str, Array] | None, agent: str, number: int
) -> dict[str, Array]:
    """Return the observations at which an agent acted, repeated to 1000; empty if there are none.

    Args:
        observations: Observations of all agents by leaf, `[1000, ...]`, or None.
        agent: Name of the agent.
        number: Index of the agent.
    """
    rows = np.flatnonzero(observations[ACTS][:, number]) if observations else ()
    if observations is None or not len(rows):
        return {}
    own = leaves_by_key(part_of(part_of(observations, AGENTS), agent))
    return {key: leaf[np.resize(rows, OBSERVATIONS)] for key, leaf in own.items()}


def drawn_observations(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> dict[str, Array]:
    """Sample observations from each leaf of a space, `[1000, ...]`, with a fixed seed.

    Floats are standard normal, clipped to their bounds; all other values are uniform. In each
    observation, at least one action is legal.
    """
    found = {key: _drawn(leaf) for key, leaf in flat_spaces(observation_space).items()}
    masks = mask_layout(observation_space, action_space)
    for row in range(OBSERVATIONS if masks is not None else 0):
        if masks is not None and masks.illegal_part({k: leaf[row] for k, leaf in found.items()}):
            for key in masks.leaves:
                found[key][row] = 1
    return found


def _drawn(leaf: spaces.Space[Any]) -> Array:
    if isinstance(leaf, Box) and leaf.dtype.kind == "f":
        numbers = np.random.default_rng(0).standard_normal((OBSERVATIONS, *leaf.shape))
        return np.clip(numbers, leaf.low, leaf.high).astype(leaf.dtype)
    leaf = copy.deepcopy(leaf)
    leaf.seed(0)
    return np.stack([leaf.sample() for _ in range(OBSERVATIONS)])


def differences(
    policy: TrainedPolicy, step: PolicyStep, run: Function, observations: Mapping[str, Array]
) -> Differences:
    """Compare the outputs of a file and of the policy, for two batch sizes.

    Recurrent policies are compared over several steps; each step starts from the policy's state.

    Args:
        policy: The policy.
        step: The policy as a function of tensors.
        run: The file as a function of tensors.
        observations: Observations by leaf, `[1000, ...]`.

    Raises:
        ExportError: If the file cannot be run, or its outputs differ by more than rounding.
    """
    own = TrainedPolicy(policy.model, policy.observation_space, policy.action_space)
    start, found = 0, []
    for n, steps in BATCHES:
        state = torch.zeros(n, step.state_size)
        for _ in range(steps):
            rows = {key: leaf[start : start + n] for key, leaf in observations.items()}
            start += n
            inputs = step.inputs(rows, state)
            with torch.no_grad():
                outputs = step(inputs)
            state = outputs.get(NEXT_STATE, state)
            expected = {name: output.numpy() for name, output in outputs.items()}
            action = own.act(unflatten_value(own.observation_space, rows.get("", rows)))
            expected.update(with_name(ACTION, flatten_value(own.action_space, action)))
            try:
                given = run(inputs)
            except Exception as error:
                problem = f"the file cannot be run: {type(error).__name__}: {error}"
                raise ExportError(problem) from error
            found.append(_compared(given, expected))
    largest, other = float(np.max([x for x, _ in found])), sum(count for _, count in found)
    if not largest <= TOLERANCE or other > MAX_OTHER_CHOICES:
        raise ExportError(
            f"the file differs from the policy: for {other} of {OBSERVATIONS:,} observations the "
            f"discrete action differs (at most {MAX_OTHER_CHOICES} allowed), and outputs x differ "
            f"by up to {largest:.1e} max(1, |x|) (at most {TOLERANCE:g}); custom networks must not "
            "have control flow that depends on tensor values, or keep state between calls"
        )
    return Differences(largest, other)


def _compared(given: dict[str, Array], expected: dict[str, Array]) -> Differences:
    """Return the differences for one batch; NaN if an output contains NaN."""
    forms = [{k: (x.dtype, x.shape) for k, x in found.items()} for found in (given, expected)]
    if forms[0] != forms[1]:
        raise ExportError(f"the file returns {forms[0]}, the policy {forms[1]}")
    is_other, gaps = np.zeros(len(next(iter(expected.values()))), np.bool_), [0.0]
    for name, array in expected.items():
        if array.dtype.kind != "f":
            is_other |= (given[name] != array).reshape(len(array), -1).any(1)
    for name, array in expected.items():
        if array.dtype.kind == "f":
            gap = np.abs(given[name] - array) / np.maximum(1.0, np.abs(array))
            gaps.append(float(gap[~is_other].max(initial=0.0)))
    return Differences(float(np.max(gaps)), int(is_other.sum()))


EXAMPLES = 7
"""Number of example observations for tracing."""


@dataclass(frozen=True)
class Export:
    """Result of an export."""

    path: Path
    """Path of the file."""

    inputs: dict[str, str]
    """Dtype and shape of each input by name."""

    outputs: dict[str, str]
    """Dtype and shape of each output by name."""

    source: str
    """Source of the observations used for the comparison."""

    differences: Differences
    """Differences between the file and the policy."""

    def __str__(self) -> str:
        """Format the result for a terminal."""
        largest, other = self.differences
        found = f"{OBSERVATIONS:,} observations of {self.source}, largest difference {largest:.1e}"
        if other:
            found += f"; {other} discrete actions differ due to rounding"
        rows = [("file", f"{self.path}, {self.path.stat().st_size:,} bytes")]
        rows += [("input", f"{name}: {form}") for name, form in self.inputs.items()]
        rows += [("output", f"{name}: {form}") for name, form in self.outputs.items()]
        return "\n".join(field_lines([*rows, ("compared", found)]))


def run_export(config: ExportConfig) -> Export:
    """Export the policy of a run; compare outputs on observations of the environment if possible.

    Raises:
        ConfigError: If a setting is invalid, or a policy has no networks.
        ExportError: If the policy cannot be traced, or the outputs of the file differ.
        MissingExtraError: If a package that the format requires is not installed.
        RunDirectoryError: If the policy is missing or damaged.
    """
    saved = read_saved_policy(config.run, config.trust)
    policy = TrainedPolicy(saved.make_model(), *saved.spaces)
    observations = None
    try:
        uses = (*PARTS_OF_POLICY, *PARTS_OF_ENV)
        env = read_saved_policy(config.run, config.trust, uses=uses).config.env
        observations = played_observations(env, policy)
    except MazeTrainError as error:
        warn(f"compared on random observations instead of episodes: {error}")
    name = "policy" if config.agent is None else f"policy_{config.agent}"
    output = config.output or saved.run_dir / f"{name}{FORMATS[config.format].suffix}"
    return export_policy(policy, output, config.format, config.agent, observations=observations)


def export_policy(
    policy: TrainedPolicy,
    output: str | Path,
    format: str = "onnx",
    agent: str | None = None,
    env: object = None,
    observations: Mapping[str, Array] | None = None,
) -> Export:
    """Export a policy to one file, after comparing the outputs of policy and file.

    Args:
        policy: The policy.
        output: Path of the file; an existing file is overwritten.
        format: `onnx` or `torch_export`.
        agent: In multi-agent environments, the agent to export; None: all agents.
        env: Environment that provides observations for the comparison, see `RolloutGenerator`;
            None: sample observations from the observation space.
        observations: Observations by leaf, `[1000, ...]`, used instead of `env`.

    Raises:
        ConfigError: If an argument is invalid, or a policy has no networks.
        EnvError: If the environment cannot be built, or fails.
        ExportError: If the policy cannot be traced, or the outputs of the file differ.
        MissingExtraError: If a package that the format requires is not installed.
    """
    check_one_of("format", format, FORMATS)
    path, kind = Path(absolute_path("output", str(output))), FORMATS[format]
    if observations is None and env is not None:
        observations = played_observations(env, policy)
    if agent is not None:
        number, policy = policy_of_agent(policy, agent)
        observations = observations_of_agent(observations, agent, number)
    step, source = PolicyStep(policy), "the environment"
    if not observations:
        source = "the space"
        observations = drawn_observations(policy.observation_space, policy.action_space)
    examples = {key: leaf[:EXAMPLES] for key, leaf in observations.items()}
    inputs = step.inputs(examples, torch.zeros(EXAMPLES, step.state_size))
    with torch.no_grad():
        forms = {"inputs": forms_of(inputs), "outputs": forms_of(step(inputs))}
    spaces = {
        name: space_to_dict(getattr(policy, name)) for name in ("observation_space", "action_space")
    }
    described = {**forms, "distributions": step.families, **spaces, "versions": dict(versions())}
    content = kind.write(step, inputs, json_text(described))
    found = differences(policy, step, kind.load(content), observations)
    with writable("output", path), atomic_write(path) as file:
        file.write(content)
    return Export(path, forms["inputs"], forms["outputs"], source, found)


def policy_of_agent(policy: TrainedPolicy, agent: str) -> tuple[int, TrainedPolicy]:
    """Return the index of an agent and its policy as a single-agent policy.

    Raises:
        ConfigError: If there is no such agent.
    """
    several = agent_spaces(policy.observation_space, policy.action_space)
    if several is None:
        raise ConfigError("agent", "only for multi-agent environments; remove this setting", agent)
    check_one_of("agent", agent, several.agents)
    joint: Any = policy.model
    own = TrainedPolicy(joint.policies[joint.agents[agent]], *several.of(agent))
    return several.agents.index(agent), own


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the dtype and shape of tensors, keyed by name; the first dimension is shown as n."""
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} [{', '.join(map(str, ['n', *x.shape[1:]]))}]"
        for name, x in tensors.items()
    }
