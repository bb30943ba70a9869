"""Suggestions for names of settings in other libraries."""

from __future__ import annotations

from typing import Any

import pytest

from maze_train import ConfigError, RolloutConfig, TrainConfig, load_rollout_config
from maze_train.config.commands import PushConfig
from maze_train.config.compose import keys_of, load_config, options
from maze_train.config.options import list_options
from maze_train.config.other_names import other_names

PPO = {"env": "CartPole-v1", "algorithm": "ppo"}
SAC = {**PPO, "algorithm": "sac"}
LOCAL = {**PPO, "runner": "local"}


@pytest.fixture(scope="module")
def all_keys() -> set[str]:
    """Return the settings of all commands, and of every algorithm on `runner=local`."""
    choices = [(("algorithm", name), ("runner", "local")) for name in list_options("algorithm")]
    training = [keys_of(TrainConfig, options("train", choice)) for choice in choices]
    return set().union(*training, keys_of(RolloutConfig, {}), keys_of(PushConfig, {}))


@pytest.mark.parametrize("key", other_names())
def test_suggestions_are_existing_settings(key: str, all_keys: set[str]) -> None:
    """Every suggestion in the table is an existing setting."""
    assert key in all_keys


@pytest.mark.parametrize(
    ("values", "key", "meant"),
    [
        (PPO, "lr", "algorithm.lr"),
        (PPO, "algorithm.learning_rate", "algorithm.lr"),
        (PPO, "algorithm.learning_rat", "algorithm.lr"),
        (PPO, "algorithm.bufer_size", "algorithm.batch_size"),  # similar to a setting of PPO
        (SAC, "bufer_size", "algorithm.replay_buffer_size"),
        (PPO, "algorithm.n_steps", "algorithm.n_rollout_steps"),
        (PPO, "n_steps", "algorithm.n_rollout_steps"),
        (PPO, "algorithm.n_envs", "runner.concurrency"),
        (PPO, "n_epochs", "algorithm.n_optimization_epochs or algorithm.n_epochs"),
        ({**PPO, "algorithm": "a2c"}, "n_epochs", "algorithm.n_epochs"),
        (PPO, "Total-Timesteps", "total_steps"),
        (PPO, "frame_stack", "env.wrappers"),
        (PPO, "use_sde", "model.distributions"),
        (PPO, "normalize", "model.normalization.mode or algorithm.reward_scaling"),
        ({**PPO, "algorithm": "td3"}, "noise_type", "algorithm.exploration_noise_stddev"),
        ({**PPO, "algorithm": "dqn"}, "exploration_fraction", "algorithm.epsilon"),
        (SAC, "algorithm.buffer_size", "algorithm.replay_buffer_size"),
        (PPO, "num_workers", "runner.n_workers (with runner=local)"),
        (LOCAL, "num_workers", "runner.n_workers"),
        (PPO, "algorithm.num_learning_epochs", "algorithm.n_optimization_epochs"),
        (PPO, "reset_num_timesteps", "resume"),
        (PPO, "num_steps_per_env", "algorithm.n_rollout_steps"),
        (PPO, "max_iterations", "algorithm.n_epochs"),
        (PPO, "actor_hidden_dims", "model.hidden_sizes"),
        (PPO, "algorithm.tau", "algorithm.gae_lambda"),
        (SAC, "tau", "algorithm.tau"),
        (
            PPO,
            "algorithm.target_update_interval",
            "algorithm.target_update_interval (not available for this choice)",
        ),
        (PPO, "reward_scale", "algorithm.reward_scaling"),
        (PPO, "wrapper", "env.wrappers"),
        (PPO, "model.normalization.norm_obs", "model.normalization.mode"),
        (PPO, "hidden_sizes", "model.hidden_sizes"),
        (PPO, "runner.seed", "seed"),
        ({**PPO, "env": {"_target_": "my.Env"}}, "env.size", "env.kwargs.size or model.rnn.size"),
    ],
)
def test_names_of_other_libraries_suggest_ours(
    values: dict[str, Any], key: str, meant: str
) -> None:
    """Only settings that exist in the configuration are suggested."""
    with pytest.raises(ConfigError) as caught:
        load_config({**values, key: 1})
    assert str(caught.value).startswith(f"{key} = 1: unknown; did you mean {meant}? allowed: ")


def test_rollouts_suggest_their_settings() -> None:
    """The same name can correspond to another setting in a rollout."""
    with pytest.raises(ConfigError, match=r"did you mean n_episodes\?"):
        load_rollout_config({"env": "CartPole-v1", "policy": "random", "n_eval_episodes": 1})
