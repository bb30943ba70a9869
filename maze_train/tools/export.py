"""Export of a policy to one file, checked against the policy before it is written."""

from __future__ import annotations

import copy
import io
import json
import logging
import re
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

from maze_train.collect.fixed_policies import FixedPolicy
from maze_train.collect.player import RolloutGenerator
from maze_train.config.commands import ExportConfig
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY
from maze_train.core.checks import absolute_path, check_one_of
from maze_train.core.errors import ConfigError, ExportError, MazeTrainError
from maze_train.core.files import atomic_write, versions, writable
from maze_train.core.notices import warn
from maze_train.core.targets import import_extra
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
"""Name of the description: of an entry of ONNX's metadata, else of a file in the archive."""

PURPOSE = "format=onnx"


class Format(NamedTuple):
    """A kind of file."""

    suffix: str
    """End of its name."""

    write: Callable[[PolicyStep, Inputs, str], bytes]
    """Gives the content for a policy, examples of its inputs, and a description in JSON."""

    load: Callable[[bytes], Function]
    """Gives a function that runs the content."""


def write_onnx(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """The policy as ONNX.

    Raises:
        ExportError: If it cannot be recorded.
        MissingExtraError: If a package is missing.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "onnx", PURPOSE)
    program = recorded(step, inputs)
    with torch.no_grad():
        outputs = list(step(inputs))
    with quiet("ONNX cannot hold the policy"):
        program = program.run_decompositions({torch.ops.aten.softplus.default: _softplus})
        found: Any = torch.onnx.export(
            program,
            dynamic_shapes=any_number(inputs),
            input_names=list(inputs),
            output_names=outputs,
            dynamo=True,
            verbose=False,
        )
        found.model.metadata_props[DESCRIPTION] = description
        content: bytes = found.model_proto.SerializeToString()
    return content


def load_onnx(content: bytes) -> Function:
    """A function that runs the policy with onnxruntime."""
    runtime = import_extra("onnxruntime", "onnx", PURPOSE)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Inputs) -> dict[str, Array]:
        arrays = {key: value.numpy() for key, value in inputs.items()}
        return dict(zip(names, session.run(names, arrays), strict=True))

    return run


def write_torch_export(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """The policy as an archive of `torch.export`."""
    buffer, program = io.BytesIO(), recorded(step, inputs)
    with quiet("PyTorch cannot write the policy"):
        torch.export.save(program, buffer, extra_files={DESCRIPTION: description})
    return buffer.getvalue()


def load_torch_export(content: bytes) -> Function:
    """A function that runs the policy with PyTorch."""
    with quiet("PyTorch cannot read the policy"):
        module = torch.export.load(io.BytesIO(content)).module()

    def run(inputs: Inputs) -> dict[str, Array]:
        with torch.no_grad():
            return {name: output.numpy() for name, output in module(inputs).items()}

    return run


def recorded(step: PolicyStep, inputs: Inputs) -> Any:
    """The operations of a policy for any number of environments, an `ExportedProgram`."""
    with quiet("PyTorch cannot record the policy"), torch.no_grad():
        return torch.export.export(step, (inputs,), dynamic_shapes=any_number(inputs), strict=False)


def any_number(inputs: Inputs) -> Any:
    """The first dimension of all inputs, which may be any number n."""
    n = torch.export.Dim("n")
    return ({name: {0: n} for name in inputs},)


@contextmanager
def quiet(problem: str) -> Iterator[None]:
    """Hide warnings and logs of PyTorch from users, and turn its exceptions into one error.

    Raises:
        ExportError: If something is raised.
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
        remedy = "networks of your own may not choose what they compute by values of tensors"
        raise ExportError(f"{found}; {remedy}, or try another format") from error
    finally:
        logging.disable(before)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """The function log(1 + exp(β x)) / β: onnxruntime has none for float64."""
    scaled = x * beta
    return (scaled.clamp(min=0.0) + (-scaled.abs()).exp().log1p()) / beta


FORMATS = {
    "onnx": Format(".onnx", write_onnx, load_onnx),
    "torch_export": Format(".pt2", write_torch_export, load_torch_export),
}


OBS, STATE = "obs", "state"
ACTION, PARAMS, NEXT_STATE = "action", "params", "next_state"
"""Names of inputs and outputs; Dict and Tuple spaces have one for each part, such as `obs/goal`."""


TARGET_POLICY = "target_policy"
"""Part of a model that serves learning alone, as critics do."""


class PolicyStep(nn.Module):
    """The most likely actions of a policy, from tensors by name to tensors by name.

    - `obs`: observations as the environment gives them, in its data types, `[n, ...]`. Of several
      agents those of each, `obs/agents/<name>`, and, for recurrent policies, `obs/acts`.
    - `state`: the recurrent state `[n, S]`, zeros where an episode begins; if recurrent.
    - `action`: actions as the environment takes them.
    - `params`: parameters of their distribution, `[n, param_size]` for each part.
    - `next_state`: the recurrent state after the observations, the `state` of the next call.

    Args:
        policy: The policy; networks are copied.

    Attributes:
        keys: Leaves of the observations that are read; the key of a lone one is empty.
        state_size: S; 0: it is not recurrent.

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
            # Numbers such as the share of random actions: they are constants from now on.
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
        """Outputs by name."""
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
        """Name of the distribution of each part of an action."""
        zeros = torch.zeros(1, self.model.param_size)
        return {key: type(part).__name__ for key, (part, _) in self.model.parts(zeros).items()}

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
            problem = "acts at random, or by custom code, which cannot be exported"
            remedy = "name one of the agents with networks, agent=<name>"
            raise ConfigError(f"policies.{name}.source", f"{problem}; {remedy}")


BATCHES = ((1, 8), (31, 32))
"""Numbers of environments and of steps of the comparison."""

OBSERVATIONS = sum(n * steps for n, steps in BATCHES)

EPISODES, STEPS = 4, 250
"""Episodes that are played at a time for observations, and steps after which they end."""

TOLERANCE = 1e-4
"""Largest difference of a number x, in units of max(1, |x|): sums in another order are rounded
otherwise."""

MAX_OTHER_CHOICES = 5
"""Observations for which another discrete action may be chosen: rounding decides between two that
are equally good."""


class Differences(NamedTuple):
    """Differences between a file and a policy."""

    largest: float
    """Largest difference of a number x, in units of max(1, |x|)."""

    other_choices: int
    """Observations for which other discrete actions were chosen."""


def played_observations(env: Any, policy: Any) -> dict[str, Array]:
    """Observations of episodes in which a policy draws its actions, by leaf, `[1000, ...]`.

    Raises:
        ConfigError: If the policy does not fit the environment.
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
    """Return the observations of one agent where it acted, repeated; empty if it never did.

    Args:
        observations: Observations of all agents by leaf, `[1000, ...]`, or None.
        agent: Its name.
        number: Its number.
    """
    rows = np.flatnonzero(observations[ACTS][:, number]) if observations else ()
    if observations is None or not len(rows):
        return {}
    own = leaves_by_key(part_of(part_of(observations, AGENTS), agent))
    return {key: leaf[np.resize(rows, OBSERVATIONS)] for key, leaf in own.items()}


def drawn_observations(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> dict[str, Array]:
    """Observations of a space by leaf, `[1000, ...]`, the same each time; some action is legal.

    Real numbers are standard normal, clipped to their bounds, all others uniform.
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
    """Compare the outputs of a file and of the policy, for batches of two sizes.

    A memory continues through the steps; the file is given that of the policy.

    Args:
        policy: The policy.
        step: The same as a function of tensors.
        run: Runs the file.
        observations: Observations by leaf, `[1000, ...]`.

    Raises:
        ExportError: If the file fails, or differs by more than rounding.
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
            f"the file acts otherwise than the policy: of {OBSERVATIONS:,} observations {other} "
            f"have other discrete actions (at most {MAX_OTHER_CHOICES} may), and numbers x differ "
            f"by up to {largest:.1e} max(1, |x|) (at most {TOLERANCE:g}); networks of your own may "
            "not choose what they compute by values of tensors, nor keep something between calls"
        )
    return Differences(largest, other)


def _compared(given: dict[str, Array], expected: dict[str, Array]) -> Differences:
    """Differences in one batch; NaN where a value is NaN."""
    forms = [{k: (x.dtype, x.shape) for k, x in found.items()} for found in (given, expected)]
    if forms[0] != forms[1]:
        raise ExportError(f"the file gives {forms[0]}, the policy {forms[1]}")
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
"""Observations with which a policy is recorded."""


@dataclass(frozen=True)
class Export:
    """A policy that was exported."""

    path: Path
    """The file."""

    inputs: dict[str, str]
    """Data type and shape of each input by name."""

    outputs: dict[str, str]
    """The same of each output."""

    source: str
    """Origin of the observations on which file and policy were compared."""

    differences: Differences
    """Differences between them."""

    def __str__(self) -> str:
        """The facts as text for a terminal."""
        largest, other = self.differences
        found = f"{OBSERVATIONS:,} observations of {self.source}, largest difference {largest:.1e}"
        if other:
            found += f"; {other} have other actions, where two are equally good but for rounding"
        rows = [("file", f"{self.path}, {self.path.stat().st_size:,} bytes")]
        rows += [("input", f"{name}: {form}") for name, form in self.inputs.items()]
        rows += [("output", f"{name}: {form}") for name, form in self.outputs.items()]
        return "\n".join(f"  {word:<9}{text}" for word, text in [*rows, ("compared", found)])


def run_export(config: ExportConfig) -> Export:
    """Export the policy of a run, compared in its environment if that can be built.

    Raises:
        ConfigError: If a setting is wrong, or a policy has no networks.
        ExportError: If the policy cannot be recorded, or the file acts otherwise.
        MissingExtraError: If a package of the format is missing.
        RunDirectoryError: If there is no policy, or it is damaged.
    """
    saved = read_saved_policy(config.run, config.trust)
    policy = TrainedPolicy(saved.make_model(), *saved.spaces)
    observations = None
    try:
        uses = (*PARTS_OF_POLICY, *PARTS_OF_ENV)
        env = read_saved_policy(config.run, config.trust, uses=uses).config.env
        observations = played_observations(env, policy)
    except MazeTrainError as error:
        warn(f"compared on observations drawn from the space, not on episodes: {error}")
    name = "policy" if config.agent is None else f"policy_{config.agent}"
    output = config.output or saved.run_dir / f"{name}{FORMATS[config.format].suffix}"
    return export_policy(policy, output, config.format, config.agent, observations=observations)


def export_policy(
    policy: TrainedPolicy,
    output: str | Path,
    format: str = "onnx",
    agent: str | None = None,
    env: Any = None,
    observations: Mapping[str, Array] | None = None,
) -> Export:
    """Export a policy to one file, after comparing the outputs of both.

    Args:
        policy: The policy.
        output: The file; an existing one is replaced.
        format: `onnx` or `torch_export`.
        agent: With several agents, the agent whose policy is exported; None: all in one file.
        env: Environment whose observations both are compared on, as for `RolloutGenerator`; None:
            observations are drawn from the observation space.
        observations: Observations by leaf, `[1000, ...]`, instead of those of `env`.

    Raises:
        ConfigError: If an argument is wrong, or a policy has no networks.
        EnvError: If the environment cannot be built, or fails.
        ExportError: If the policy cannot be recorded, or the file acts otherwise.
        MissingExtraError: If a package of the format is missing.
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
    # JSON has no infinity, but numbers that all readers take for it.
    text = re.sub(r"([\[ ]-?)Infinity(?=[,\]}])", r"\g<1>1e999", json.dumps(described))
    content = kind.write(step, inputs, text)
    found = differences(policy, step, kind.load(content), observations)
    with writable("output", path), atomic_write(path) as file:
        file.write(content)
    return Export(path, forms["inputs"], forms["outputs"], source, found)


def policy_of_agent(policy: TrainedPolicy, agent: str) -> tuple[int, TrainedPolicy]:
    """Number of one of several agents, and its policy, on its own observations.

    Raises:
        ConfigError: If there is no such agent.
    """
    several = agent_spaces(policy.observation_space, policy.action_space)
    if several is None:
        raise ConfigError("agent", "the environment has one agent: leave it out", agent)
    check_one_of("agent", agent, several.agents)
    joint: Any = policy.model
    own = TrainedPolicy(joint.policies[joint.agents[agent]], *several.of(agent))
    return several.agents.index(agent), own


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Data type and shape of tensors by name, the first dimension of which is any number n."""
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} [{', '.join(map(str, ['n', *x.shape[1:]]))}]"
        for name, x in tensors.items()
    }
