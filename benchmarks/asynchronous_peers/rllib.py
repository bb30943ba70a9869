"""Training throughput of RLlib's IMPALA or PPO.

    python rllib.py [--algorithm ppo] --env cartpole --actors 2 --seconds 20

Counts the transitions in the losses of finished updates, without the rows that RLlib appends to
episodes in order to compute the value of the last observation.
"""

# The peer is installed in a separate virtual environment, so types are not checked.
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import os
import secrets
import tempfile
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Otherwise Ray writes a token file into the home directory.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
from common import PPO, PPO_ENVS, UNROLL, WORKLOADS, Window, Workload, make_env, parse_arguments
from ray.rllib.algorithms.impala import IMPALA, IMPALAConfig
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env
from torch import nn


class TimedLearner(IMPALATorchLearner):
    """Adds each update to the window."""

    window: Window

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Start an update, in the learner thread."""
        self.began, self.learned = time.perf_counter(), 0
        super().before_gradient_based_update(timesteps=timesteps)

    def compute_loss_for_module(self, *, batch: dict[str, Any], **kwargs: Any) -> Any:
        """Count the transitions of the batch."""
        self.learned += int(batch[Columns.LOSS_MASK].sum())
        return super().compute_loss_for_module(batch=batch, **kwargs)

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Finish an update."""
        super().after_gradient_based_update(timesteps=timesteps)
        self.window.add(self.began, time.perf_counter(), self.learned)


class NatureCNN(TorchRLModule, ValueFunctionAPI):
    """Policy and critic with shared convolutional layers (Mnih et al., 2015)."""

    def setup(self) -> None:
        """Build the layers."""
        self.trunk = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
        )
        self.policy = nn.Linear(512, int(self.action_space.n))
        self.critic = nn.Linear(512, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features = self.trunk(batch[Columns.OBS].float() / 255.0)
        return {Columns.EMBEDDINGS: features, Columns.ACTION_DIST_INPUTS: self.policy(features)}

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._forward(batch)[Columns.ACTION_DIST_INPUTS]}

    _forward_exploration = _forward_inference  # features are not sent to the learner

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        """Compute the values of observations."""
        features = self._forward(batch)[Columns.EMBEDDINGS] if embeddings is None else embeddings
        return self.critic(features).squeeze(-1)


def build(workload: Workload, actors: int) -> IMPALA:
    """Build IMPALA with remote environment runners and the learner in this process."""
    config = IMPALAConfig()
    prepare(config, workload.env)
    config.env_runners(
        num_env_runners=actors,
        num_envs_per_env_runner=workload.envs_per_actor,
        rollout_fragment_length=UNROLL,
    )
    config.learners(num_learners=0, num_gpus_per_learner=0, learner_class=TimedLearner)
    config.training(
        train_batch_size_per_learner=workload.batch_size,
        # With the default of 0, RLlib polls for rollouts continuously and is slower.
        timeout_s_sampler_manager=0.02,
    )
    config.reporting(min_time_s_per_iteration=1)
    return config.build_algo()


def build_ppo(env: str, actors: int) -> Any:
    """Build PPO in the same way; it waits for its environment runners."""
    config = PPOConfig()
    prepare(config, env)
    config.env_runners(
        num_env_runners=actors,
        num_envs_per_env_runner=PPO["envs"] // actors,
        rollout_fragment_length=PPO["rollout"],
    )
    config.learners(num_learners=0, num_gpus_per_learner=0)
    config.training(
        train_batch_size_per_learner=PPO["envs"] * PPO["rollout"],
        minibatch_size=PPO["minibatch"],
        num_epochs=PPO["passes"],
    )
    return config.build_algo()


def prepare(config: Any, env: str) -> None:
    """Configure the environment and the networks."""
    if env.startswith("ALE/"):
        module = RLModuleSpec(module_class=NatureCNN)
    else:
        net = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
        module = RLModuleSpec(model_config=DefaultModelConfig(**net))
    register_env("benchmark", lambda _: make_env(env))
    config.environment("benchmark").framework("torch")
    config.rl_module(rl_module_spec=module)
    config.debugging(seed=0, log_level="ERROR")


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    window = TimedLearner.window = Window(arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=arguments.actors + 1, include_dashboard=False, _temp_dir=folder)
        if arguments.algorithm == "ppo":
            algorithm = build_ppo(PPO_ENVS[arguments.env], arguments.actors)
        else:
            algorithm = build(WORKLOADS[arguments.env], arguments.actors)
        while not window.is_over:
            began = time.perf_counter()
            algorithm.train()
            if arguments.algorithm == "ppo":
                window.add(began, time.perf_counter(), PPO["envs"] * PPO["rollout"])
        algorithm.stop()
        ray.shutdown()
    window.print()


if __name__ == "__main__":
    main()
