"""Throughput of sb3-contrib's augmented random search (ARS).

    python sb3_ars.py --setting short --workers 2 --seconds 10

With one worker the policies are evaluated sequentially in this process, otherwise in processes of
`AsyncEval`. Counts the episodes of finished updates.
"""

# The peer is installed in a separate virtual environment, so types are not checked.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import torch
from common import ENVS, LR, NOISE_STDDEV, POPULATION, Window, initial_parameters, parse_arguments
from sb3_contrib import ARS
from sb3_contrib.common.vec_env import AsyncEval
from stable_baselines3.common.vec_env import DummyVecEnv


class TimedARS(ARS):
    """Adds each update to the window, and stops at its end."""

    window: Window

    def _do_one_update(self, callback: Any, async_eval: Any) -> None:
        super()._do_one_update(callback, async_eval)
        lengths = [int(episode["l"]) for episode in self.ep_info_buffer]
        self.window.add(sum(lengths), len(lengths))
        if self.window.is_over:
            self.num_timesteps = self._total_timesteps


def make_envs(env_id: str) -> DummyVecEnv:
    """Create one environment in the form that sb3-contrib requires."""
    return DummyVecEnv([partial(gymnasium.make, env_id, disable_env_checker=True)])


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    env_id = ENVS[arguments.setting]
    model = TimedARS(
        "MlpPolicy",
        make_envs(env_id),
        n_delta=POPULATION // 2,
        n_top=POPULATION // 2,
        learning_rate=LR,
        delta_std=NOISE_STDDEV,
        zero_policy=False,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
        seed=0,
    )
    model.weights = initial_parameters()
    model.policy.load_from_vector(model.weights)
    model.window = Window(arguments.seconds)
    async_eval = None
    if arguments.workers > 1:
        envs = [partial(make_envs, env_id)] * arguments.workers
        async_eval = AsyncEval(envs, model.policy)
    model.learn(1_000_000_000, async_eval=async_eval, log_interval=None)
    model.window.print()


if __name__ == "__main__":
    main()
