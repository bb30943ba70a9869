"""Export of a policy: one file, compared with the policy before it is written."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maze_train.checks import absolute_path, check_one_of
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY
from maze_train.config.writing import writable
from maze_train.errors import ConfigError, MazeTrainError
from maze_train.export.check import (
    OBSERVATIONS,
    Differences,
    differences,
    drawn_observations,
    observations_of_agent,
    played_observations,
)
from maze_train.export.formats import FORMATS
from maze_train.export.step import PolicyStep
from maze_train.files import atomic_write
from maze_train.notices import warn
from maze_train.runners.saved_policies import read_saved_policy
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.serialize import space_to_dict
from maze_train.training.policy_files import TrainedPolicy
from maze_train.versions import versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.config.export_config import ExportConfig
    from maze_train.types import Array, Tensor


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
        ExportError: If the policy can not be recorded, or the file acts otherwise.
        MissingExtraError: If a package of the format is missing.
        RunDirectoryError: If there is no policy, or it is damaged.
    """
    saved = read_saved_policy(config.run, config.trust)
    policy = TrainedPolicy(saved.make_model(), *saved.spaces)  # type: ignore[arg-type]  # an ActingModel
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
    """Write a policy as one file, after its content was compared with the policy.

    Args:
        policy: The policy.
        output: The file; one that is there is replaced.
        format: `onnx`, `torchscript` or `torch_export`.
        agent: Of several agents the one whose policy it is; None: all of them in one file.
        env: Environment in which both are compared, as `RolloutGenerator` takes it; None:
            observations are drawn from the observation space.
        observations: Observations by leaf, `[1000, ...]`, in place of both.

    Raises:
        ConfigError: If an argument is wrong, or a policy has no networks.
        EnvError: If the environment can not be built, or fails.
        ExportError: If the policy can not be recorded, or the file acts otherwise.
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
