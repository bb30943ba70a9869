"""Final performance over several seeds, compared with Stable-Baselines3 at equal settings.

    OMP_NUM_THREADS=1 python benchmarks/last_policies.py td3|dqn|ppo [seeds]

TD3 on Pendulum-v1 and DQN on CartPole-v1 with the settings of the presets, without double
Q-learning, PPO on LunarLander-v3 with the defaults; mean returns of the same 100 episodes.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise

from maze_train import load_policy, train

WIDE = {"net_arch": [256, 256]}
DQN_PEER = {"learning_rate": 2.3e-3, "train_freq": 256, "gradient_steps": 128, "batch_size": 64}
DQN_PEER |= {"target_update_interval": 256, "exploration_fraction": 0.16, "learning_starts": 1_000}
DQN_PEER |= {"exploration_final_eps": 0.04, "policy_kwargs": WIDE}
DQN: dict[str, Any] = {"lr": 2.3e-3, "n_rollout_steps": 256, "update_to_data_ratio": 0.5}
DQN |= {"target_update_interval": 128, "epsilon": {"points": [[0, 1], [0.16, 0.04]]}}
TD3_PEER = {"learning_rate": 1e-3, "learning_starts": 1_000, "policy_kwargs": WIDE}
PPO_PEER = {"learning_rate": lambda left: 1e-3 * left, "n_steps": 128, "batch_size": 256}
# Environment, steps, number of environments; non-default settings of both libraries.
CASES: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "td3": ("Pendulum-v1", 10_000, 1, {"lr": 1e-3}, TD3_PEER),
    "dqn": ("CartPole-v1", 50_000, 1, {"double_q": False, **DQN}, DQN_PEER),
    "ppo": ("LunarLander-v3", 20_000, 8, {}, PPO_PEER),
}


def ours(name: str, seed: int, directory: str) -> Any:
    """Train with this package and return the final policy."""
    env, steps, n_envs, settings, _ = CASES[name]
    own = {f"algorithm.{key}": value for key, value in settings.items()}
    own |= {"model.hidden_sizes": [256, 256]} if name == "dqn" else {}
    own |= {"runner.concurrency": n_envs, "evaluation.interval": 1_000, "total_steps": steps}
    train(env, name, seed=seed, run_dir=directory, **own)
    return load_policy(f"{directory}@final").act


def peer(name: str, seed: int, _: str) -> Any:
    """Train with Stable-Baselines3 and return the final policy."""
    env, steps, n_envs, _, settings = CASES[name]
    noise = {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, 0.1))}
    settings = {**settings, **(noise if name == "td3" else {}), "seed": seed, "device": "cpu"}
    make = getattr(stable_baselines3, name.upper())
    model = make("MlpPolicy", make_vec_env(env, n_envs), **settings).learn(steps)
    return lambda observations, likely: model.predict(observations, deterministic=likely)[0]


def play(env: str, act: Any, likely: bool, episodes: int = 100) -> float:
    """Return the mean return of episodes with seeds from 10,000."""
    envs = gym.make_vec(env, episodes, vectorization_mode="sync")
    observations, _ = envs.reset(seed=[10_000 + i for i in range(episodes)])
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        observations, rewards, ended, cut, _ = envs.step(act(observations, likely))
        returns += rewards * running
        running &= ~(ended | cut)
    return float(returns.mean())


if __name__ == "__main__":
    for seed in range(int(sys.argv[2]) if len(sys.argv) > 2 else 10):
        for side in (ours, peer):
            with tempfile.TemporaryDirectory() as directory:
                act = side(sys.argv[1], seed, directory)
            likely, sampled = (play(CASES[sys.argv[1]][0], act, how) for how in (True, False))
            print(
                f"{side.__name__} {seed} most likely {likely:.1f} sampled {sampled:.1f}", flush=True
            )
