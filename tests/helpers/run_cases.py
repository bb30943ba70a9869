"""Table of short runs for tests of all kinds of runs: `CASES`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from killed_runs import differences, final_state, rows_of
from recorded import cartpole_heuristic, record
from rollouts import play

from maze_train import Trajectory, load_policy, train

if TYPE_CHECKING:
    from pathlib import Path

OWN = [
    *("agent_envs", "called_envs", "goal_envs", "own_callbacks", "own_dqn", "own_envs"),
    *("own_networks", "own_parts", "own_policies"),
    *("run_cases", "benchmarks"),
]
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "runner": "dev",
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 20,
    "checkpoint.keep_last": 4,
    "model.hidden_sizes": [8],
    "seed": 1,
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}
PENDULUM = {"env": {"id": "Pendulum-v1", "max_episode_steps": 20}}
A2C: dict[str, Any] = {
    "algorithm.lr": 1e-3,  # a schedule depends on where training ends
    "algorithm.epoch_length": 2,
    "algorithm.n_rollout_steps": 16,
    "runner.concurrency": 2,
    "total_steps": 4 * 64,
}
OFF_POLICY: dict[str, Any] = {
    "algorithm.epoch_length": 16,
    "algorithm.n_rollout_steps": 2,
    "algorithm.batch_size": 8,
    "algorithm.initial_buffer_size": 40,
    "algorithm.replay_buffer_size": 200,  # wraps around
    "runner.concurrency": 2,
    "total_steps": 4 * 64,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {**A2C, "algorithm.batch_size": 16, "algorithm.n_optimization_epochs": 3},
    "a2c": A2C,
    "sac": {**OFF_POLICY, "algorithm.update_to_data_ratio": 0.3},
    "td3": {
        **OFF_POLICY,
        **PENDULUM,
        "algorithm.update_to_data_ratio": 0.3,
        "algorithm.exploration_noise_stddev": {"points": [[0, 1], [200, 0.1]], "by": "env_steps"},
    },
    "dqn": {
        **OFF_POLICY,
        "algorithm.target_update_interval": 9,
        "algorithm.epsilon": {"points": [[0, 1], [200, 0.1]], "by": "env_steps"},
    },
    "impala": {
        "algorithm.epoch_length": 3,
        "algorithm.n_rollout_steps": 8,
        "algorithm.num_actors": 2,
        "algorithm.actors_batch_size": 3,  # epochs begin with either actor
        "algorithm.lr": 0.005,
        "runner.concurrency": 4,
        "total_steps": 4 * 3 * 48,
    },
    "es": {
        "algorithm.epoch_length": 3,
        "algorithm.n_rollouts_per_update": 4,
        "algorithm.max_steps": 30,
        "algorithm.noise_table_size": 5000,
        "runner.concurrency": 3,
        "algorithm.n_epochs": 4,
        "total_steps": 0,
    },
    "bc": {
        "algorithm.epoch_length": 7,
        "algorithm.batch_size": 16,
        "model.normalization.mode": "running",
        "algorithm.n_epochs": 4,
    },
}
"""Settings of each algorithm for four epochs."""

FORK = {"runner": "local", "runner.start_method": "fork"}
LOCAL = {**FORK, "runner.n_workers": 2}
ONE_EPOCH, TWO_EPOCHS, FOUR_EPOCHS = ({"algorithm.n_epochs": n} for n in (1, 2, 4))
NORMALISED = {"model.normalization.mode": "running", "model.normalization.n_steps": 48}
MEMORY = {"model": "vector_rnn", "model.rnn.size": 8}
DICT_ENV = {"env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "tuple"}}}
POLES = {"_target_": "benchmarks.tensor_cartpole.TensorCartPole", "backend": "tensor"}
DEMONSTRATIONS = {"_target_": "run_cases.demonstrations"}
MASKS = {"env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "mask", "action": "choice"}}}
LEVELS = {"env": {"_target_": "called_envs.LevelEnv"}}
KEPT_LEVELS = {"env": {"_target_": "called_envs.KeptLevelEnv"}}


def called(env: dict[str, Any], *, draws: bool = False) -> dict[str, Any]:
    """Return the settings of a run whose callback calls environments at every update."""
    return {**env, "callbacks": [{"_target_": "called_envs.Caller", "draws": draws}]}


CURRICULUM = {
    **LEVELS,
    "curriculum.stages": [
        {**until, "attributes": {"level": float(level)}}
        for level, until in enumerate([{}, {"above": 0.2}, {"steps": 150}, {"above": 0.2}])
    ],
    "curriculum.window": 2,
    "curriculum.evaluate": True,
}


def changing(*changes: Any) -> dict[str, Any]:
    """Return the settings of a run whose callback changes settings after updates."""
    changes = tuple(list(change) for change in changes)
    return {"callbacks": [{"_target_": "own_callbacks.Changes", "changes": list(changes)}]}


CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, changes": {
        **changing(
            (1, "entropy_coef", 0.05),
            (3, "lr", "adaptive_kl_0.02"),
            (3, "target_kl", 0.05),
            (5, "clip_range", {"points": [[0, 0.1], [300, 0.3]], "by": "env_steps"}),
            (6, "max_grad_norm", 0.1),
        ),
        **NORMALISED,
    },
    "ppo, normalised": {
        **PENDULUM,
        **NORMALISED,
        "algorithm.reward_scaling": True,
        "algorithm.lr": {"adaptive_kl": 0.02, "start": 0.005},
    },
    "ppo, memory": {**DICT_ENV, **MEMORY},
    "ppo, steps": {
        "algorithm.epoch_length": 4,
        "evaluation.interval_steps": 50,
        "evaluation.dump_interval_steps": 90,
        "total_steps": 4 * 128,
    },
    "ppo, actors": {
        **PENDULUM,
        **NORMALISED,
        "algorithm.reward_scaling": True,
        "runner.envs_per_actor": 1,
    },
    "ppo, frozen parts": {
        "algorithm.lr_factors": {"critic": 2.0},
        "algorithm.freeze": ["*.bias", {"params": ["policy"], "period": 2, "stop": 1}],
    },
    "ppo, optimizer of torch": {
        "algorithm.overrides.default.optimizer": {"_target_": "torch.optim.SGD", "momentum": 0.9},
        "algorithm.overrides.default.lr_scheduler": {
            "_target_": "torch.optim.lr_scheduler.StepLR",
            "step_size": 2,
        },
    },
    "ppo, simulator": {"env": POLES},
    "ppo, masks": MASKS,
    "ppo, own network": {"model.policy": {"_target_": "own_networks.OwnNet"}},
    "ppo, calls": called(LEVELS),
    "ppo, calls that draw": called(KEPT_LEVELS, draws=True),
    "ppo, calls of a simulator": called(
        {"env": {"_target_": "called_envs.LevelSimulator", "backend": "tensor"}}
    ),
    "ppo, curriculum": CURRICULUM,
    "a2c": {},
    "a2c, memory": MEMORY,
    "a2c, actors with memory": {**DICT_ENV, **MEMORY, "runner.envs_per_actor": 1},
    "sac": {},
    "sac, changes": {
        "algorithm.entropy_tuning": False,
        **changing((25, "entropy_coef", 0.3), (33, "critic_lr", 2e-3), (40, "tau", 0.02)),
    },
    "sac, large buffer": {"algorithm.replay_buffer_size": 1000},
    "sac, disk": {**DICT_ENV, "algorithm.replay_buffer_storage": "disk"},
    "sac, prioritised": {
        "algorithm.replay_buffer": {"_target_": "maze_train.PrioritizedReplayBuffer"},
        "algorithm.n_step_returns": 3,
        "algorithm.policy_update_interval": 2,
    },
    "sac, initial phase": {
        "algorithm.initial_buffer_size": 150,
        "algorithm.initial_action_repeat": 7,
    },
    "sac, demonstrations": {
        "algorithm.initial_demonstration_trajectories": DEMONSTRATIONS,
        "model.normalization.mode": "running",
        "model.normalization.n_steps": 100,
    },
    "sac, simulator": {"env": POLES},
    "sac, masks": MASKS,
    "sac, curriculum": CURRICULUM,
    "sac, relabelled curriculum": {
        "env": {"_target_": "called_envs.ReachEnv"},
        "algorithm.replay_buffer": "her",
        "curriculum.stages": [
            {"attributes": {"reach": 0.9}},
            {"steps": 100, "attributes": {"reach": 0.3}},
        ],
    },
    "td3": {},
    "td3, several boxes": {
        **NORMALISED,
        "env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "boxes"}},
        "algorithm.n_step_returns": 3,
        "algorithm.replay_buffer": {"_target_": "maze_train.PrioritizedReplayBuffer"},
    },
    "td3, hindsight": {
        "env": {"_target_": "goal_envs.PointToGoal", "kwargs": {"length": 7, "ends": True}},
        "algorithm.replay_buffer": "her",
        "algorithm.n_step_returns": 2,
    },
    "dqn": {},
    "dqn, masks": MASKS,
    "dqn, own algorithm": {
        "algorithm": {"_target_": "own_dqn.DQNConfig"},
        "algorithm.initial_buffer_size": 40,
    },
    "dqn, changes": changing((9, "epsilon", 0.7), (35, "lr", 1e-3)),
    "dqn, all options": {
        "algorithm.dueling": True,
        "algorithm.num_quantiles": 5,
        "algorithm.n_step_returns": 3,
        "algorithm.replay_buffer": {"_target_": "maze_train.PrioritizedReplayBuffer"},
        "model.normalization.mode": "running",
        "model.normalization.n_steps": 48,
    },
    "impala": {},
    "impala, changes": changing(
        (2, "entropy_coef", 0.1), (4, "lr", 1e-3), (7, "vtrace_clip_rho_threshold", None)
    ),
    "impala, calls": called(LEVELS),
    "impala, old weights": {**DICT_ENV, "algorithm.broadcast_interval": 2},
    "impala, normalised": {**PENDULUM, **NORMALISED, "algorithm.broadcast_interval": 5},
    "impala, replay": {
        **DICT_ENV,
        **MEMORY,
        "algorithm.replay_size": 5,
        "algorithm.broadcast_interval": 2,
    },
    "impala, replay of stacks": {
        "env": {
            "_target_": "own_envs.SpacesEnv",
            "wrappers": [{"_target_": "maze_train.ObservationStackWrapper", "n": 3}],
        },
        "algorithm.replay_size": 4,
        "algorithm.replay_proportion": 0.4,
    },
    "es": {},
    "es, changes": changing((2, "noise_stddev", 0.2), (5, "lr", 0.1), (7, "l2_penalty", 0.1)),
    "es, normalised": {
        **PENDULUM,
        **NORMALISED,
        "algorithm.lr": "linear_0.1",
        "algorithm.noise_stddev": {"points": [[0, 0.5], [8, 0.01]], "by": "updates"},
    },
    "es, more steps": {
        **NORMALISED,
        "algorithm.n_timesteps_per_update": 150,
        "algorithm.optimizer": {"_target_": "torch.optim.SGD", "momentum": 0.8},
        "algorithm.lr": {"points": [[0, 0.5], [900, 0.01]], "by": "env_steps"},
    },
    "es, sampled": {
        **DICT_ENV,
        "algorithm.deterministic": False,
        "algorithm.action_noise_stddev": 0.3,
        "algorithm.optimizer": {"_target_": "torch.optim.Adam", "amsgrad": True},
    },
    "es, memory": {**MEMORY, **NORMALISED},
    "es, calls": called(KEPT_LEVELS, draws=True),
    "es, curriculum": CURRICULUM,
    "es, wrapped": {"algorithm.policy_wrapper": {"_target_": "own_networks.Rule"}},
    "es, steps end it": {"total_steps": 700, "algorithm.n_epochs": 0, "algorithm.lr": "linear_0.1"},
    "bc": {},
    "bc, validation only": {"algorithm.epoch_length": 0, "evaluation.n_episodes": 0},
    "bc, balanced": {
        "algorithm.lr": "linear_0.01",
        "algorithm.entropy_coef": 0.1,
        "algorithm.class_weights": "balanced",
    },
}
"""Settings of each case, in addition to the settings of its algorithm."""

HEAPS = {"_target_": "agent_envs.Heaps"}
"""Players act in turn; a referee with different spaces joins and leaves."""
RECURRENT = {
    "model.rnn": {"cell": "gru", "size": 6},
    "algorithm.n_rollout_steps": 12,
    "algorithm.sequence_length": 4,
}
FEW = {
    "algorithm.n_rollout_steps": 3,
    "algorithm.epoch_length": 8,
    "algorithm.replay_buffer_size": 90,  # wraps around
}
CENTRALIZED = {"model.centralized_critic": True}


def meets_snapshots(**opponents: Any) -> dict[str, Any]:
    """Return settings in which the players play against snapshots of their policy."""
    players = {"agents": ["first", "second"], "opponents": opponents}
    return {"policies": {"main": players, "judge": {"agents": ["referee"]}}}


def meets(**foe: Any) -> dict[str, Any]:
    """Return settings in which one player plays against another policy."""
    players = {"main": {"agents": ["first"]}, "foe": {"agents": ["second"], **foe}}
    return {"policies": {**players, "judge": {"agents": ["referee"]}}}


EACH_EPOCH = meets_snapshots(add_every=1, keep=2, draw="by_strength")
OF_AGENTS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "a2c": {"model.normalization.mode": "running", "model.normalization.n_steps": 20},
    "ppo, memory": RECURRENT,
    "ppo, changes": changing(
        (2, "overrides.first.lr", 1e-4),
        (3, "overrides.referee.max_grad_norm", 0.1),
        (3, "lr", 5e-4),
        (5, "overrides.first.lr", {"points": [[0, 1e-3], [500, 1e-4]], "by": "env_steps"}),
    ),
    "ppo, actors": {**RECURRENT, "runner.envs_per_actor": 1},
    "sac": {**FEW, "algorithm.n_step_returns": 3},
    "dqn": {
        **FEW,
        **NORMALISED,
        # The warm-up continues beyond an epoch, which ends during a repeated action.
        "algorithm.replay_buffer_size": 200,
        "algorithm.initial_buffer_size": 160,
        "algorithm.initial_action_repeat": 5,
    },
    "td3": {**FEW, "env": {"_target_": "agent_envs.Pushers"}},
    "sac, hindsight by priority": {
        **FEW,
        "env": {"_target_": "goal_envs.PairToGoals", "kwargs": {"length": 6, "ends": True}},
        "algorithm.replay_buffer": "prioritized_her",
        "algorithm.n_step_returns": 2,
    },
    "impala": {"algorithm.broadcast_interval": 2},
    "impala, replay": {**RECURRENT, "algorithm.replay_size": 3},
    "impala, centralised, replay": {**CENTRALIZED, "algorithm.replay_size": 3},
    "ppo, centralised": {**RECURRENT, **NORMALISED, **CENTRALIZED},
    "es": {},
    "es, memory": {"model.rnn": {"cell": "gru", "size": 6}, "env.max_episode_steps": 9},
    "bc": {**NORMALISED, "algorithm.epoch_length": 5},
    "ppo, random foe": meets(source="random"),
    "ppo, own foe": meets(source={"_target_": "own_policies.TakesOne"}),
    "ppo, frozen foe": meets(frozen=True),
    "ppo, one learns": {**meets(), "policies_to_train": ["main"]},
    "ppo, league": EACH_EPOCH,
    "ppo, league by win rate": meets_snapshots(
        add_every=0, at_win_rate=0.4, least_episodes=3, keep=2
    ),
    "ppo, league, centralised": {**EACH_EPOCH, **CENTRALIZED},
    "ppo, league, memory": {**EACH_EPOCH, **RECURRENT},
}
"""Cases with several agents. Any turn of an episode may fall between two rollouts."""
CASES |= {
    f"agents: {case}": {
        "env": HEAPS,
        **({} if case[:2] in ("es", "bc") else {"algorithm.n_rollout_steps": 13}),
        "algorithm.n_epochs": 4,
        "total_steps": 0,
        **more,
    }
    for case, more in OF_AGENTS.items()
}


ONLY_DQN = ("algorithm.target_update_interval", "algorithm.epsilon")


def algorithm_of(case: str) -> str:
    """Return the algorithm of a case."""
    return case.removeprefix("agents: ").partition(",")[0]


def demonstrations(path: str = "") -> list[Trajectory]:
    """Return one demonstration on CartPole."""
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(8, 4)).astype(np.float32), rng.integers(0, 2, 7)
    return [Trajectory(obs, actions, np.ones(7), terminated=True, truncated=False)]


def data_for(case: str, directory: Path) -> Path:
    """Return the dataset of BC; existing episodes are reused."""
    if not case.startswith("agents"):
        return directory if directory.exists() else record_cartpole(directory)
    if not directory.exists():
        play(env=HEAPS, policy="random", record=True, n_episodes=12, output_dir=str(directory))
    return directory / "trajectories"


def record_cartpole(directory: Path, n_episodes: int = 10, **how: Any) -> Path:
    """Record episodes of a heuristic."""
    env = gymnasium.make("CartPole-v1")
    return record(directory, env, how.get("act", cartpole_heuristic), n_episodes)


def settings(case: str, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run; the dataset of BC is next to the run directory."""
    algorithm = algorithm_of(case)
    given = {**SMALL, "algorithm": algorithm, **ALGORITHMS[algorithm], **CASES[case]}
    if isinstance(given["algorithm"], dict):  # options of the other algorithm do not apply
        given = {key: value for key, value in given.items() if key not in ONLY_DQN}
    if algorithm == "bc":
        given["runner.dataset"] = str(data_for(case, run_dir.parent / "data"))
    return {**given, "run_dir": str(run_dir), **changes}


def start(case: str, run_dir: Path, **changes: Any) -> Any:
    """Start a run of four epochs, unless the changes set another length."""
    return train(**settings(case, run_dir, **changes))


def words(given: dict[str, Any]) -> list[str]:
    """Return settings as arguments of `maze-run`."""
    return [f"{key}={_word(value)}" for key, value in given.items()]


def _word(value: Any) -> str:
    """Format a value for Hydra."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_word(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value)


go_on = functools.partial(train, trust=OWN)
"""Resume a run."""


def parts_of(checkpoint: Path) -> dict[str, int]:
    """Return the inodes of the large parts of a checkpoint by name."""
    return {path.name: path.stat().st_ino for path in checkpoint.glob("part_*")}


def assert_same_training(run_dir: Path, other: Path) -> None:
    """Check that all results are identical, except restarts and the steps that ES discards."""
    ignored = dict.fromkeys(("population/steps_dropped", "train/worker_restarts"), "")
    rows, others = ([{**row, **ignored} for row in rows_of(path)] for path in (run_dir, other))
    assert len(rows) >= 3
    assert rows == others
    state, wanted = ({**final_state(path), "steps_dropped": 0} for path in (run_dir, other))
    assert differences(state, wanted) == []
    weights, best = (load_policy(path, OWN).model.state_dict() for path in (run_dir, other))
    assert differences(dict(weights), dict(best)) == []
