"""Hindsight replay: relabelled transitions match a slow reference; errors."""

from __future__ import annotations

import collections

import gymnasium
import numpy as np
import pytest
import torch
from goal_envs import NoReward, PointToGoal
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import (
    BOX_ACTION,
    ReferenceReplay,
    Step,
    Stream,
    added,
    assert_same_leaves,
    filled,
    rollout_of,
    rollout_of_one,
)

from maze_train import train
from maze_train.core.errors import ConfigError, EnvError, MazeTrainError, SpaceError, TrainingError
from maze_train.data.hindsight import HindsightReplayBuffer, PrioritizedHindsightReplayBuffer
from maze_train.data.replay import PrioritizedReplayBuffer, UniformReplayBuffer

GAMMA = 0.9
GOAL = spaces.Box(-np.inf, np.inf, (2,), np.float64)
SPACE = spaces.Dict({"observation": GOAL, "achieved_goal": GOAL, "desired_goal": GOAL})
STRATEGIES = ("future", "final", "episode")
GOALS = {"_target_": "goal_envs.PointToGoal"}


class Task(gymnasium.Env):
    """Goal-based environment whose rewards differ between goals."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        assert achieved_goal.dtype == desired_goal.dtype == np.float64
        assert info == {}
        return (7 * achieved_goal[..., 0] + 3 * desired_goal[..., 0]) % 11 - 5


class EndingTask(Task):
    """Goal-based environment in which goals determine termination."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        assert achieved_goal.shape == desired_goal.shape == (2,)
        return (achieved_goal[0] + 2 * desired_goal[0]) % 4 == 0


class GoalStream(Stream):
    """Random experience of a task; achieved goals are above 0, desired goals below."""

    def __init__(self, rng, num_envs, task, ends=0.2, waiting=0, **settings):
        self.task = task
        kinds = ("truncated", "ignored") if isinstance(task, EndingTask) else ("terminated", "both")
        kinds = (*kinds, "truncated", "ignored", *["waiting"] * waiting)
        settings = {"kinds": kinds, **settings}
        super().__init__(rng, num_envs, SPACE, ends=ends, **settings)

    def new_obs(self):
        obs = super().new_obs()
        goal = np.full(2, -float(self.rng.integers(1, 1000)), np.float32)
        return {**obs, "desired_goal": goal}

    def next_obs(self, env):
        self.led_to = {**super().next_obs(env), "desired_goal": self.obs[env]["desired_goal"]}
        return self.led_to

    def step(self, env):
        step = super().step(env)
        if step.waits:
            return step
        goals = [self.led_to[key].astype(np.float64) for key in ("achieved_goal", "desired_goal")]
        step.reward = float(self.task.compute_reward(*goals, {}))
        if isinstance(self.task, EndingTask) and step.valid:
            step.terminated = bool(self.task.compute_terminated(*goals, {}))
            if step.terminated and not step.truncated:
                self.obs[env] = self.first_obs(env)
        step.final_obs = self.led_to if step.terminated or step.truncated else None
        return step


class ReferenceHindsight(ReferenceReplay):
    """Reference that follows episodes through the rows in plain Python."""

    def __init__(self, rows, num_envs, n_steps, task, strategy):
        super().__init__(rows, num_envs, n_steps, GAMMA)
        self.task, self.strategy = task, strategy

    def goals(self):
        """Return the goals that each transition may get, by row and environment."""
        found = {}
        first, last = max(0, len(self.steps) - 1 - self.rows), len(self.steps) - 1
        for env in range(self.num_envs):
            episode = []
            for row in range(first, len(self.steps)):
                step = self.steps[row][env]
                episode += [row] if step.valid else []
                goes_on = (step.valid or step.waits) and not (step.terminated or step.truncated)
                if row < last and not goes_on:
                    found |= {(r, env): self.candidates(episode, r, env) for r in episode}
                    episode = []
            found |= {(row, env): [] for row in episode}
        return found

    def candidates(self, episode, row, env):
        rows = {
            "future": [r for r in episode if r >= row],
            "final": episode[-1:],
            "episode": episode,
        }[self.strategy]
        return [self.after(r, env)["achieved_goal"] for r in rows]

    def relabelled(self, row, env, goal):
        """Return reward, discount and next observation for another goal."""
        reward, discount = 0.0, 1.0
        for taken in self.rows_from(row, env):
            step = self.steps[taken][env]
            after = self.after(taken, env)
            goals = [x.astype(np.float64) for x in (after["achieved_goal"], goal)]
            reward += discount * self.task.compute_reward(*goals, {})
            discount *= self.gamma
            if isinstance(self.task, EndingTask):
                is_terminal = self.task.compute_terminated(*goals, {})
            else:
                is_terminal = step.terminated
            if is_terminal:
                discount = 0.0
                break
        return reward, discount, {**after, "desired_goal": goal}


def run(run_dir, **settings):
    """Run a short training of SAC with hindsight."""
    algorithm = {"name": "sac", "epoch_length": 20, "batch_size": 16, "n_rollout_steps": 4}
    algorithm |= {"initial_buffer_size": 60, "n_step_returns": 2, "replay_buffer": "her"}
    algorithm |= {"update_to_data_ratio": 0.2}
    return train(
        algorithm={**algorithm, **settings.pop("algorithm", {})},
        model={"hidden_sizes": [8]},
        evaluation={"n_episodes": 0},
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        seed=0,
        run_dir=str(run_dir),
        **{"total_steps": 480, **settings},
    )


def make(rows=10, num_envs=1, n_steps=1, task=None, strategy="future", seed=0, **settings):
    """Return a buffer, its reference, and a stream of experience."""
    task, kind = task or Task(), settings.pop("kind", HindsightReplayBuffer)
    stream = GoalStream(np.random.default_rng(seed), num_envs, task, **settings.pop("stream", {}))
    settings = {"num_envs": num_envs, "n_steps": n_steps, "gamma": GAMMA, **settings}
    buffer = kind(rows * num_envs, SPACE, BOX_ACTION, strategy=strategy, seed=seed, **settings)
    buffer.use_environment(lambda: task)
    return buffer, ReferenceHindsight(rows, num_envs, n_steps, task, strategy), stream


def assert_samples_are_right(buffer, reference, n_samples):
    """Assert that samples have their original or an allowed goal and match the reference."""
    goals = reference.goals()
    assert len(buffer) == len(goals)
    if not goals:
        return
    places = {int(reference.steps[r][b].obs["observation"][0]): (r, b) for r, b in goals}
    batch = buffer.sample_batch(n_samples)
    for i, number in enumerate(batch.obs["observation"][:, 0].tolist()):
        row, env = places[int(number)]
        step, goal = reference.steps[row][env], batch.obs["desired_goal"][i].numpy()
        assert_same_leaves(batch.actions, i, step.action)
        if goal[0] < 0:
            _, _, reward, discount, next_obs = reference.walk(row, env)
            goal = step.obs["desired_goal"]
        else:
            assert any(np.array_equal(goal, other) for other in goals[row, env])
            reward, discount, next_obs = reference.relabelled(row, env, goal)
        assert_same_leaves(batch.obs, i, {**step.obs, "desired_goal": goal})
        assert batch.rewards[i] == pytest.approx(reward, abs=1e-5)
        assert batch.discounts[i] == pytest.approx(discount, abs=1e-6)
        if discount:
            assert_same_leaves(batch.next_obs, i, next_obs)


CASE = {
    "rows": st.integers(1, 12),
    "n_steps": st.integers(1, 4),
    "strategy": st.sampled_from(STRATEGIES),
    "task": st.sampled_from([Task(), EndingTask()]),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(max_examples=80, deadline=None)
@given(
    num_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(-1, 15), min_size=1, max_size=8),
    kind=st.sampled_from([HindsightReplayBuffer, PrioritizedHindsightReplayBuffer]),
    ends=st.sampled_from([{}, {"ends": 0.5, "waiting": 9}]),
    **CASE,
)
def test_hindsight_samples_match_the_reference(lengths, ends, **case):
    """Samples match for all kinds of ends, ignored rows, interruptions and several ring turns.

    The buffer may be prioritized, and agents may wait.
    """
    buffer, reference, stream = make(stream=ends, **case)
    for _ in added(buffer, reference, stream, lengths):
        assert_samples_are_right(buffer, reference, 40)
        buffer.update_priorities(torch.arange(buffer._memory.ring.size), torch.tensor([0.5]))


@settings(max_examples=40, deadline=None)
@given(interrupts=st.lists(st.booleans(), min_size=1, max_size=40), **CASE)
def test_single_transitions_are_relabelled(interrupts, **case):
    """Single steps are relabelled like rollouts."""
    buffer, reference, stream = make(stream={"kinds": ("truncated",)}, **case)
    for interrupt in interrupts:
        if interrupt and len(buffer):
            for owner in (buffer, reference, stream):
                owner.interrupt()
        step = stream.step(0)
        buffer.add_rollout(rollout_of_one(step, stream.led_to))
        reference.add([[step], [Step(stream.led_to)]])
        assert_samples_are_right(buffer, reference, 20)


@pytest.mark.parametrize("waiting", [0, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hindsight_goals_are_equally_likely(strategy, waiting):
    """Allowed goals are equally likely, and k / (k + 1) of the samples are relabelled."""
    stream = {"ends": 0.15 * (1 + waiting), "kinds": ("truncated", *["waiting"] * waiting)}
    buffer, reference, stream = make(
        30, 2, strategy=strategy, relabelled_per_original=3, stream=stream
    )
    for _ in added(buffer, reference, stream, [50]):
        batch = buffer.sample_batch(60_000)
    numbers = batch.obs["observation"][:, 0].tolist()
    drawn = collections.Counter(zip(numbers, batch.obs["desired_goal"][:, 0].tolist(), strict=True))
    times = collections.Counter(numbers)
    running = 0
    for (row, env), goals in reference.goals().items():
        number = float(reference.steps[row][env].obs["observation"][0])
        own = times[number] - sum(drawn[number, float(goal[0])] for goal in goals)
        assert own == drawn[number, float(reference.steps[row][env].obs["desired_goal"][0])]
        running += not goals
        if goals:
            shares = [drawn[number, float(goal[0])] / times[number] for goal in goals]
            assert np.abs(np.array(shares) - 0.75 / len(goals)).max() < 0.07
            assert abs(sum(shares) - 0.75) < 0.07
    assert running > 0


def test_prioritized_hindsight_samples_by_priority():
    """With the same seed, transitions and weights equal those of a prioritized buffer."""
    buffer, _, stream = make(20, 2, kind=PrioritizedHindsightReplayBuffer)
    settings = {"num_envs": 2, "gamma": GAMMA}
    plain = PrioritizedReplayBuffer(40, SPACE, BOX_ACTION, **settings)
    rollout = rollout_of(stream.steps(15), SPACE)
    for owner in (buffer, plain):
        owner.add_rollout(rollout)
        owner.set_progress(0.5)
        owner.update_priorities(torch.arange(12), torch.linspace(0, 9, 12))
    found, expected = buffer.sample_batch(500), plain.sample_batch(500)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.weights, expected.weights)
    assert (found.obs["desired_goal"] > 0).any()
    assert buffer.nbytes == plain.nbytes + 8 * buffer._memory.ring.size


def test_zero_hindsight_goals_relabel_nothing():
    """With K = 0, no goal changes."""
    buffer, reference, stream = make(30, 2, relabelled_per_original=0)
    for _ in added(buffer, reference, stream, [50]):
        assert (buffer.sample_batch(500).obs["desired_goal"] < 0).all()


@pytest.mark.parametrize("task", [Task(), EndingTask()])
@pytest.mark.parametrize("storage", ["memory", "disk", "device"])
def test_loaded_hindsight_buffer_continues_identically(tmp_path, storage, task):
    """A loaded buffer continues identically for any storage and fill level."""
    case = {"num_envs": 2, "n_steps": 2, "task": task, "strategy": "episode"}
    buffer, _, stream = make(**case)
    for length in (3, 4, 9, 1, 7, 30, 2):
        state = buffer.state_dict()
        other, _, _ = make(**case, storage=storage, directory=tmp_path)
        if length != 4:  # the buffer contains other experience
            other.add_rollout(rollout_of(make(**case, stream={"ends": 1.0})[2].steps(9), SPACE))
        other.load_state_dict(state)
        if len(buffer):
            assert_same_samples(buffer, other)
        rollout = rollout_of(stream.steps(length), SPACE)
        for owner in (buffer, other):
            owner.add_rollout(rollout)
        assert_same_samples(buffer, other)


def assert_same_samples(buffer, other):
    """Assert that both buffers return the same transitions with the same goals."""
    ours, theirs = buffer.sample_batch(50), other.sample_batch(50)
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.obs["desired_goal"], theirs.obs["desired_goal"])
    assert torch.equal(ours.rewards, theirs.rewards)
    assert torch.equal(ours.discounts, theirs.discounts)


def test_hindsight_state_without_final_observations_raises():
    """The state has no final observations of terminated episodes."""
    buffer, _, _ = make()
    uniform, _, _ = filled(10, 1, lengths=(3,))
    with pytest.raises(ConfigError, match="terminal_obs is kept, saved as missing"):
        buffer.load_state_dict({**uniform.state_dict(), "layout": {}})


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "futur"}, "strategy = 'futur': expected one of .* did you mean 'future'"),
        ({"relabelled_per_original": -1}, "relabelled_per_original = -1: expected a number >= 0"),
        ({"observation_space": GOAL}, r"requires Dict observations.* got Box.*: use"),
        (
            {"observation_space": spaces.Dict({**SPACE, "desired_goal": spaces.Discrete(3)})},
            r"of the same shape and dtype, got Dict.*: use a goal-based environment",
        ),
    ],
)
def test_invalid_buffer_settings_raise(change, message):
    """The error contains the setting or the space, and what is expected."""
    settings = {"buffer_size": 10, "observation_space": SPACE, "actions": BOX_ACTION, **change}
    error = SpaceError if "observation_space" in change else ConfigError
    with pytest.raises(error, match=message):
        HindsightReplayBuffer(**settings)


def failing(*goals_and_info):
    """Raise an error because of the empty info."""
    raise KeyError("speed")


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        (
            "compute_reward",
            failing,
            "compute_reward of Task raised KeyError: 'speed'; .* empty info",
        ),
        ("compute_terminated", failing, "compute_terminated of Task raised KeyError"),
        ("compute_reward", lambda a, d, i: np.zeros(1), "of Task returned .* 9 finite"),
        ("compute_reward", lambda a, d, i: np.full(len(a), np.nan), "of Task returned"),
        ("compute_reward", lambda a, d, i: np.full(len(a), 7.5), "the environment returns 7.5 and"),
        (
            "compute_terminated",
            lambda a, d, i: True,
            "terminated=False, but .* and True: hindsight",
        ),
    ],
)
def test_compute_reward_that_contradicts_rewards_raises(name, function, message):
    """The error contains the function and is raised when experience is added."""
    task = Task()
    buffer, _, stream = make(stream={"ends": 0.0})
    setattr(task, name, function)
    buffer.use_environment(lambda: task)
    with pytest.raises(EnvError, match=message):
        buffer.add_rollout(rollout_of(stream.steps(9), SPACE))


def test_two_rounding_differences_of_compute_reward_are_allowed():
    """Two rewards may differ from `compute_reward`; a third one raises an error."""
    buffer, _, stream = make(100, stream={"ends": 0.0})
    for _ in range(2):
        steps = stream.steps(4)
        steps[0][0].reward += 1.0
        buffer.add_rollout(rollout_of(steps, SPACE))
    steps = stream.steps(4)
    steps[0][0].reward += 1.0
    with pytest.raises(EnvError, match="requires rewards that depend only on the goals"):
        buffer.add_rollout(rollout_of(steps, SPACE))


def test_hindsight_without_environment_or_method_raises():
    """Errors name a missing environment, method or final observation."""
    buffer = HindsightReplayBuffer(10, SPACE, BOX_ACTION)
    stream = GoalStream(np.random.default_rng(0), 1, Task(), ends=1.0, kinds=("terminated",))
    with pytest.raises(TrainingError, match="call use_environment"):
        buffer.add_rollout(rollout_of(stream.steps(2), SPACE))
    with pytest.raises(EnvError, match=r"requires an environment with compute_reward.* NoReward"):
        buffer.use_environment(NoReward)
    steps = stream.steps(2)
    steps[1][0].final_obs = None
    with pytest.raises(MazeTrainError, match=r"step 1 of .* 0 was terminated: .* final_obs"):
        buffer.add_rollout(rollout_of(steps, SPACE))
    for key in ("achieved_goal", "observation"):
        steps = stream.steps(1)
        steps[0][0].final_obs = {**steps[0][0].final_obs, key: np.full(2, np.inf)}
        with pytest.raises(EnvError, match=f"last observation .* is not finite in '{key}'"):
            buffer.add_rollout(rollout_of(steps, SPACE))


SCALED = {"_target_": "maze_train.envs.wrappers.RewardScalingWrapper", "scale": 0.1}
FLAT = {"_target_": "gymnasium.wrappers.FlattenObservation"}


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        ("Pendulum-v1", ConfigError, r"replay_buffer = 'her': .* got Box.*: use a goal"),
        ({**GOALS, "wrappers": [FLAT]}, ConfigError, "^algorithm.replay_buffer = 'her': .* Box"),
        ({**GOALS, "training_wrappers": [SCALED]}, EnvError, "Remove wrappers that change"),
        ({"_target_": "goal_envs.NoReward"}, EnvError, "compute_reward.* which NoReward does not"),
    ],
)
def test_environments_without_goals_raise(tmp_path, env, error, message):
    """The error is raised before the run directory is created, or in the first step."""
    with pytest.raises(error, match=message):
        run(tmp_path / "run", env=env)


class MovingGoal(PointToGoal):
    """The goal moves after each step; the reward depends on the goal that was pursued."""

    pursued = True

    def step(self, action):
        before = self.goal
        *_, truncated, info = super().step(action)
        self.goal = (self.goal + 0.3).clip(-1.0, 1.0) * [1.0, -1.0]
        goal = before if self.pursued else self.np_random.uniform(-1.0, 1.0, 2)
        reward = float(self.compute_reward(self.position, goal, {}))
        return self._observed(), reward, self.ends and not reward, truncated, info


class RandomGoal(MovingGoal):
    """The reward depends on a goal that is not observed."""

    pursued = False


def test_goals_may_move_within_an_episode(tmp_path):
    """The recorded reward may depend on the goal before or after the step, and on no other."""
    for ends in (False, True):
        env = {"_target_": "test_hindsight.MovingGoal", "kwargs": {"ends": ends}}
        assert run(tmp_path / f"run{ends}", env=env).summary.env_steps == 480
    with pytest.raises(EnvError, match="requires rewards that depend only on the goals"):
        run(tmp_path / "other", env={"_target_": "test_hindsight.RandomGoal"})


class Asking(UniformReplayBuffer):
    """Replay buffer that uses an environment."""

    def use_environment(self, make_env):
        make_env()


def test_native_vector_environments_do_not_support_hindsight(tmp_path):
    """Native vector environments do not support buffers that use an environment."""
    node = {"_target_": "test_hindsight.Asking"}
    with pytest.raises(
        ConfigError, match=r"algorithm.replay_buffer = .* set env.backend=gymnasium"
    ):
        run(
            tmp_path / "run",
            env={"id": "CartPole-v1", "backend": "native"},
            algorithm={"replay_buffer": node},
        )
