"""Environments with tensors as inputs and outputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces
from killed_runs import rows_of
from run_cases import ALGORITHMS, SMALL
from tensor_sims import Robot

from maze_train import ConfigError, EnvConfig, EnvError, load_policy, train
from maze_train.algorithms.actor_critic.batch import evaluate_rollout
from maze_train.collect.episodes import ReportedInfos
from maze_train.collect.simulators import SimulatorCollector
from maze_train.core.errors import ShapeError, SpaceError
from maze_train.core.events import Statistics
from maze_train.core.targets import InlineObject
from maze_train.envs.factory import EnvFactory
from maze_train.envs.third_party import make_third_party_env
from maze_train.functional.returns import discounts_and_lambdas, lambda_advantages
from maze_train.learner.ranks import OneRank
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.simulators.functional import space_of_size
from maze_train.simulators.make import make_simulator
from maze_train.training.evaluators import RolloutEvaluator

OWN = ["tensor_sims", "benchmarks"]
POLES = {"_target_": "benchmarks.tensor_cartpole.TensorCartPole", "backend": "tensor"}
ARRAYS = {"_target_": "tensor_sims.cartpole_of_arrays", "backend": "native"}
ROBOT = {"_target_": "tensor_sims.Robot", "backend": "tensor"}
SHORT = {"max_episode_steps": 20}


def short(algorithm, run_dir, env, **changes):
    """Run a short training."""
    given = {**SMALL, **ALGORITHMS[algorithm], "algorithm": algorithm, **changes}
    return train(**{**given, "env": env, "run_dir": str(run_dir), "runner.concurrency": 3})


def collector_of(
    make, num_steps, num_envs=3, memory=None, truncation="bootstrap_previous", **settings
):
    """Return a collector on a simulator, and a model."""
    target = EnvConfig(target=InlineObject(make), backend="tensor", truncation=truncation)
    env = make_third_party_env(target, num_envs, training=True)
    config = ModelConfig(hidden_sizes=[8], rnn=memory)
    model = build_actor_critic(config, env.single_observation_space, env.single_action_space, 0)
    return SimulatorCollector(env, num_steps, env_seed=3, action_seed=5, **settings), model


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    everyday(
        3,
        [
            ("ppo", {}),
            ("a2c", {"model.rnn": {"cell": "gru", "size": 6}}),
            ("dqn", {}),
            ("sac", {"algorithm.n_step_returns": 3}),
            ("ppo", {"model.normalization.mode": "running", "model.normalization.n_steps": 48}),
        ],
        are_rows=True,
    ),
)
def test_tensor_and_array_environments_give_identical_metrics(algorithm, changes, tmp_path):
    """Tensor and array environments lead to bit-for-bit identical metrics."""
    for name, env in (("tensors", POLES), ("arrays", ARRAYS)):
        changes = {**changes, "total_steps": 256}
        short(algorithm, tmp_path / name, {**env, **SHORT}, **changes)
    assert rows_of(tmp_path / "tensors") == rows_of(tmp_path / "arrays")
    assert len(rows_of(tmp_path / "tensors")) >= 2


class OwnNumbers:
    """Expected values of `Robot`: step s of episode e of environment i."""

    def __init__(self, env):
        self.env, self.episode, self.step = env, 0, 0

    def observation(self):
        return np.array([self.env, self.episode, self.step]) / 10 + 1

    def advance(self):
        """Return reward, final observation, terminated and truncated."""
        self.step += 1
        reward, last = self.step + self.env, self.observation()
        ended = self.step == 3 + (self.env + self.episode) % 3
        odd = self.episode % 2 == 1
        if ended:
            self.episode, self.step = self.episode + 1, 0
        return reward, last, ended and odd, ended and not odd


def slow_advantages(value, num_steps, num_envs, gamma, decay, truncation):
    """GAE (Schulman et al. 2016, eq. 16) of each environment, computed as explicit sums."""
    found = np.zeros((num_steps, num_envs))
    for i in range(num_envs):
        world, deltas, continues = OwnNumbers(i), [], []
        for _ in range(num_steps):
            before = world.observation()
            reward, last, terminated, truncated = world.advance()
            after = {
                "bootstrap_previous": value(before),
                "as_termination": 0.0,
                "final_obs": value(last),
            }[truncation]
            following = after if truncated else (0.0 if terminated else value(last))
            deltas.append(reward + gamma * following - value(before))
            continues.append(not (terminated or truncated))
        for t in range(num_steps):
            weight = 1.0
            for k in range(t, num_steps):
                found[t, i] += weight * deltas[k]
                weight *= gamma * decay * continues[k]
    return found


class RobotWithLast(Robot):
    """`Robot` that returns final observations."""

    def step(self, actions):
        numbers = torch.stack([self.numbers, self.episodes, self.steps + 1], 1) / 10 + 1
        obs, *rest, info = super().step(actions)
        return obs, *rest, {**info, "final_obs": {"policy": numbers, "critic": numbers.square()}}


@pytest.mark.parametrize("style", ["five results", "four results"])
@pytest.mark.parametrize("truncation", ["bootstrap_previous", "as_termination", "final_obs"])
def test_truncation_setting_selects_the_bootstrap_value(truncation, style, capsys):
    """Advantages match a reference for each setting of `env.truncation`, in two rollouts."""
    gives = truncation == "final_obs"
    settings = {} if gives else {"truncation": truncation}
    collector, model = collector_of(
        lambda num_envs: (RobotWithLast if gives else Robot)(num_envs, style=style), 13, **settings
    )

    def value(x):
        obs = {"policy": torch.tensor(x), "critic": torch.tensor(x).square()}
        return model.double().values({k: v[None] for k, v in obs.items()}).item()

    parts = []
    for _ in range(2):
        rollout, _ = collector.collect_steps(model.float())
        evaluated = evaluate_rollout(model, rollout, False, OneRank())
        parts.append((rollout, evaluated.values.clone(), evaluated.next_values.clone()))
        discounts, lambdas = discounts_and_lambdas(rollout.end, 0.9, 0.8)
        values = evaluated.values, evaluated.next_values
        parts[-1] = lambda_advantages(rollout.rewards, discounts, *values, lambdas).clone()
    # The trace ends with each rollout, so the second one is compared from its start.
    expected = slow_advantages(value, 26, 3, 0.9, 0.8, truncation)[13:]
    np.testing.assert_allclose(parts[1], expected, rtol=1e-4)
    notes = capsys.readouterr().err.count("returns no final observations")
    assert notes == (0 if gives else 1)


def test_simulator_infos_become_metrics():
    """Infos per environment are recorded at episode ends, scalar infos at every step."""
    keys = ["Episode_Reward/alive", "height"]
    collector, model = collector_of(Robot, 7, info_keys=keys)
    _, episodes = collector.collect_steps(model)
    assert episodes.infos["height"] == [0, 1, 2, 0]
    assert len(episodes.infos["Episode_Reward/alive"]) == 7
    assert episodes.lengths == [3, 4, 5, 4]
    assert episodes.returns == [6, 14, 25, 10]


class Sparse(Robot):
    """`Robot` that reuses buffers and reports infos and final observations at episode ends only.

    As in ManiSkill, final infos are in `final_info`.
    """

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.buffer, self.total = torch.zeros(num_envs), torch.zeros(())

    def step(self, actions):
        played = self.numbers, self.episodes, self.steps + 1
        obs, rewards, terminated, truncated, _ = super().step(actions)
        self.buffer[:] = 0.0
        self.total += 1
        info = {"total": self.total, "own": self.buffer, "log": {"half": 0.5}}
        if not (terminated | truncated).any():
            return obs, rewards.double(), terminated, truncated, info
        self.buffer[:] = 100 * played[0] + 10 * played[1] + played[2]
        last = torch.stack(played, 1) / 10 + 1
        nested = {"episode": {"nested": played[2]}}
        final = {"is_success": played[1] % 2 == 1, "own": self.buffer, **nested}
        final_obs = {"policy": last, "critic": last.square()} if self.total != 12 else None
        info |= {"final_info": final, "final_observation": final_obs}
        return obs, rewards.double(), terminated, truncated, info


def test_infos_written_in_place_belong_to_their_episode():
    """Each episode has the values of its last step, also in evaluations."""
    collector, model = collector_of(Sparse, 7, info_keys=["total", "own", "nested", "half"])
    _, episodes = collector.collect_steps(model)
    assert episodes.infos["own"] == [3, 104, 205, 14]
    assert episodes.infos["nested"] == [3, 4, 5, 4]
    assert episodes.infos["total"] == [1, 2, 3, 4, 5, 6, 7]
    assert episodes.infos["half"] == [0.5] * 7
    assert episodes.successes == [0.0, 0.0, 0.0, 1.0]
    env = make_third_party_env(
        EnvConfig(target=InlineObject(Sparse), backend="tensor"), 3, training=False
    )
    evaluator = RolloutEvaluator(
        lambda _: env, 4, concurrency=3, info_keys=["total", "own", "half"]
    )
    metrics = evaluator.evaluate(model)
    assert metrics["eval/success_rate"] == 0.25
    assert metrics["eval/info/own"] == np.mean([3, 104, 205, 14])
    assert metrics["eval/info/total"] == np.mean([3, 4, 5, 7])
    assert metrics["eval/info/half"] == 0.5


def test_scalar_infos_are_metrics_without_episode_ends():
    """Means over environments are metrics, even if no episode ends in the rollout."""
    collector, model = collector_of(Endless, 3, info_keys=["Episode_Reward/alive", "height"])
    _, episodes = collector.collect_steps(model)
    statistics = Statistics()
    episodes.record(statistics, ReportedInfos())
    assert statistics.reduce() == {"train/info/Episode_Reward/alive": 3.0}


@pytest.mark.parametrize("truncation", ["bootstrap_previous", "as_termination"])
def test_final_observations_do_not_leak_between_rollouts(truncation):
    """Rollouts have no final observations of earlier rollouts."""
    collector, model = collector_of(Sparse, 4, truncation=truncation)
    given, *_, lacking = [
        (rollout.final_positions.tolist(), rollout.final_obs, rollout.terminated[3].clone())
        for rollout, _ in (collector.collect_steps(model) for _ in range(3))
    ]
    assert given[0] == [2 * 3 + 0, 3 * 3 + 1]
    assert given[1]["policy"][1].tolist() == pytest.approx([1.1, 1.0, 1.4])
    if truncation == "as_termination":
        assert (lacking[0], lacking[2].all()) == ([], True)
    else:
        assert lacking[0] == [9, 10, 11]
        assert lacking[1]["policy"][1].tolist() == pytest.approx([1.1, 1.2, 1.2])


class Huge(Robot):
    """`Robot` with rewards that float32 rounds, but whose sums float32 can represent."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        signs = 1.0 * (self.steps == 1) - 1.0 * (self.steps == 2)
        return obs, rewards.double() + 1e8 * signs, *rest


def test_simulator_returns_are_summed_in_double_precision():
    """Returns are summed in double precision, even if training uses single precision."""
    collector, model = collector_of(Huge, 7)
    assert collector.collect_steps(model)[1].returns == [6, 14, 25, 10]


def test_recurrent_state_is_reset_at_episode_ends():
    """The recurrent state is reset at episode ends, without reading the flags on the host."""
    memory = RecurrentConfig(cell="gru", size=4)
    collector, model = collector_of(Robot, 7, memory=memory)
    rollout, _ = collector.collect_steps(model)
    assert rollout.hidden_states is not None
    is_zero = (rollout.hidden_states[1:] == 0).all(-1)
    assert torch.equal(is_zero, rollout.ended)


@pytest.mark.parametrize("make", [Robot, Sparse, RobotWithLast])
def test_recurrent_bootstrap_without_final_observation_reads_no_step_twice(make):
    """Without a final observation, the bootstrap value is the value of the step itself."""
    collector, model = collector_of(make, 8, memory=RecurrentConfig(cell="gru", size=4))
    lacking = 0
    for _ in range(3):
        rollout, _ = collector.collect_steps(model)
        evaluated = evaluate_rollout(model, rollout, False, OneRank())
        missing = rollout.truncated.clone()
        missing.view(-1)[rollout.final_positions] = False
        lacking += int(missing.sum())
        assert torch.equal(evaluated.next_values[missing], evaluated.values[missing])
        for k, position in enumerate(rollout.final_positions.tolist()):
            row = {key: leaf.flatten(0, 1)[[position]] for key, leaf in rollout.obs.items()}
            state = model.policy_step(row, rollout.hidden_states.flatten(0, 1)[[position]])[1]
            last = {key: leaf[[k]] for key, leaf in rollout.final_obs.items()}
            value = evaluated.next_values.flatten()[position]
            torch.testing.assert_close(value, model.values(last, state)[0])
    assert (lacking == 0) == (make is RobotWithLast)


def test_truncation_setting_works_with_actors(tmp_path, capsys):
    """Returns of the first update depend on `env.truncation` in the same way with actors."""
    found = {}
    for truncation in ("bootstrap_previous", "as_termination"):
        for actors in (0, 3):
            env = {**ROBOT, "truncation": truncation, "kwargs": {"style": "four results"}}
            changes = {"runner.envs_per_actor": actors, "algorithm.epoch_length": 1}
            changes |= {"total_steps": 48, "evaluation.n_episodes": 0}
            changes |= {"model.rnn": {"cell": "gru", "size": 4}}
            run = short("ppo", tmp_path / f"{truncation}_{actors}", env, **changes)
            found[truncation, actors] = run.history[0]["train/returns_mean"]
            assert capsys.readouterr().err.count("returns no final observations") == 1
        assert found[truncation, 0] == found[truncation, 3]
    assert found["bootstrap_previous", 3] != found["as_termination", 3]


class Nested(RobotWithLast):
    """`Robot` with nested observations and actions."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        box = self.single_action_space
        parts = spaces.Tuple((self.single_observation_space, spaces.Discrete(9)))
        self.single_observation_space = spaces.Dict({"b": spaces.Dict({"c": parts})})
        self.single_action_space = spaces.Dict({"a": spaces.Tuple((box,))})

    def nested(self, parts, steps):
        return {"b": {"c": (parts, steps.long())}}

    def reset(self, seed=None):
        return self.nested(super().reset()[0], self.steps), {}

    def step(self, actions):
        steps = self.steps + 1
        obs, *rest, info = super().step(actions["a"][0])
        last = self.nested(info["final_obs"], steps)
        return self.nested(obs, self.steps), *rest, {**info, "final_obs": last}


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "ppo"},
        {"algorithm": "ppo", "runner.envs_per_actor": 3},
        {"algorithm": "impala", "algorithm.num_actors": 1},
    ],
)
def test_simulators_support_nested_observations(changes, tmp_path):
    """Nested observations work in training, with actors, in evaluation, in single environments."""
    env = {"_target_": "test_simulators.Nested", "backend": "tensor"}
    result = short(run_dir=tmp_path / "run", env=env, total_steps=96, trust=OWN, **changes)
    assert result.history[-1]["eval/episode_length_mean"] == 3.5
    policy = load_policy(result.run_dir, OWN)
    single = EnvFactory(EnvConfig(target="test_simulators.Nested", backend="tensor"))()
    obs, _ = single.reset(seed=0)
    for _ in range(3):
        assert single.observation_space.contains(obs)
        obs, _, terminated, truncated, _ = single.step(policy.act(obs))
    assert single.observation_space.contains(obs)
    assert truncated
    assert not terminated
    assert obs["b"]["c"][1] == 3


class BadLast(RobotWithLast):
    """`Robot` with non-finite final observations of terminated or truncated episodes."""

    def __init__(self, num_envs, how):
        super().__init__(num_envs)
        self.how = how

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        ended = {"terminated": terminated, "truncated": truncated}[self.how]
        info["final_obs"]["critic"][ended] = torch.nan
        return obs, rewards, terminated, truncated, info


@pytest.mark.parametrize(
    ("how", "keeps", "fails"),
    [("truncated", False, True), ("terminated", False, False), ("terminated", True, True)],
)
def test_non_finite_final_observations_raise(how, keeps, fails):
    """Final observations must be finite; those of terminated episodes only if they are stored."""
    collector, model = collector_of(lambda num_envs: BadLast(num_envs, how), 12)
    collector.keeps_terminal_obs = keeps
    if not fails:
        rollout, _ = collector.collect_steps(model)
        assert rollout.terminated.any()
        return
    step = 2 if how == "truncated" else 6
    words = f"environment 0 of .* returned a last observation .* not finite in step {step} "
    with pytest.raises(EnvError, match=words):
        collector.collect_steps(model)


def test_closing_the_adapter_closes_the_simulator_once():
    """Only once, and only if the simulator has a method `close`."""
    closed = []

    class Closing(Robot):
        def close(self):
            closed.append(self.num_envs)

    for make in (Robot, Closing):
        target = EnvConfig(target=InlineObject(make), backend="tensor")
        with make_third_party_env(target, 3, training=True) as env:
            env.close()
    assert closed == [3]


class BadNumbers(Robot):
    """`Robot` that returns a non-finite reward."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        rewards[1] = rewards[1] + (float("inf") if self.steps[0] == 2 else 0)
        return obs, rewards, *rest


class Arrays(Robot):
    """`Robot` that returns arrays."""

    def reset(self, seed=None):
        return {key: obs.numpy() for key, obs in super().reset()[0].items()}, {}


class Wider(Robot):
    """`Robot` that returns observations of another shape."""

    def reset(self, seed=None):
        return {key: obs[:, :2] for key, obs in super().reset()[0].items()}, {}


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (BadNumbers, EnvError, "environment 1 of .*BadNumbers returned a reward .* in step 1"),
        (Arrays, SpaceError, "'critic' of .*Arrays is ndarray: expected a tensor; .*native"),
        (Wider, ShapeError, r"'critic' of .* has shape \[3, 2\], its space has \[3, 3\]"),
        (lambda num_envs: Robot(2), EnvError, "has 2 environments, expected 3"),
        (lambda: object(), EnvError, "has no num_envs, .* or a functional one of JAX"),
    ],
)
def test_invalid_simulators_raise_one_message(make, kind, words):
    """The error names the environment and what is expected."""

    def collect():
        collector, model = collector_of(make, 5)
        collector.collect_steps(model)

    with pytest.raises(kind, match=f"(?s){words}"):
        collect()


def test_simulator_without_state_dict_begins_new_episodes(tmp_path, capsys):
    """Without `state_dict`, resuming requires `checkpoint.allow_new_episodes`."""
    changes = {"total_steps": 0, "algorithm.n_epochs": 2}
    short("ppo", tmp_path / "run", ROBOT, **changes)
    assert capsys.readouterr().err.count("begins new episodes; resuming requires") == 1
    again = {"resume": str(tmp_path / "run"), "trust": OWN, "algorithm.n_epochs": 3}
    with pytest.raises(EnvError, match=r"checkpoint\.allow_new_episodes=true"):
        train(**again)
    train(**again, **{"checkpoint.allow_new_episodes": True})
    assert len(rows_of(tmp_path / "run")) == 3


def test_critic_observation_group_is_not_read_by_the_policy(tmp_path):
    """The critic reads an additional observation group; the policy acts without it."""
    robots = {
        "model.critic_obs": ["critic"],
        "model.distributions": {"Box": {"name": "diagonal_gaussian", "log_std_min": -1.0}},
        "algorithm.lr": "adaptive_kl",
        "algorithm.n_minibatches": 4,
    }
    result = short("ppo", tmp_path / "run", ROBOT, **robots, total_steps=96)
    policy = load_policy(result.run_dir, OWN)
    seen = {"policy": np.ones(3, np.float32)}
    with_both = policy.act({**seen, "critic": np.full(3, 9.0, np.float32)})
    assert np.array_equal(policy.act(seen), with_both)


def test_simulator_works_as_single_gymnasium_environment(tmp_path):
    """A simulator can be used as a single Gymnasium environment."""
    result = short("ppo", tmp_path / "run", {**POLES, **SHORT}, total_steps=192)
    policy = load_policy(result.run_dir, OWN)
    env = EnvFactory(EnvConfig(target=POLES["_target_"], backend="tensor", **SHORT))()
    with pytest.raises(EnvError, match=r"TensorCartPole cannot be rendered: .* render\(\)"):
        env.render()
    obs, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    assert np.array_equal(obs, again)
    assert env.observation_space.contains(obs)
    ended, steps = False, 0
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        ended, steps = terminated or truncated, steps + 1
    assert reward == 1.0
    assert terminated or steps == 20
    assert terminated != (np.abs(obs[0]) <= 2.4 and np.abs(obs[2]) <= np.radians(12))


def test_rollout_beyond_free_memory_raises(tmp_path):
    """A rollout that exceeds the free memory raises ConfigError before it is allocated."""
    changes = {"runner.concurrency": 3, "algorithm.n_rollout_steps": 10**12, "total_steps": 10**13}
    given = {**SMALL, "algorithm": "a2c", **changes, "run_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"n_rollout_steps.*96000\.00 GB, but .* are free on cpu"):
        train(**{**given, "env": {**POLES, **SHORT}})


class Endless(RobotWithLast):
    """`Robot` whose episodes never end."""

    def step(self, actions):
        obs, rewards, terminated, _, info = super().step(actions)
        none = torch.zeros_like(terminated)
        return obs, rewards, none, none, info


def test_evaluation_of_endless_simulator_episodes_raises():
    """An evaluation raises an error at its step limit, since only the simulator can reset."""
    config = EnvConfig(target=InlineObject(Endless), backend="tensor")
    env = make_third_party_env(config, 3, training=False, max_episode_steps=6)
    env.reset(seed=0)
    actions = np.zeros((3, 2), np.float32)
    for _ in range(5):
        env.step(actions)
    with pytest.raises(EnvError, match=r"within the 6 steps of evaluation\.max_episode_steps"):
        env.step(actions)
    enough = EnvConfig(target=InlineObject(RobotWithLast), backend="tensor")
    env = make_third_party_env(enough, 3, training=False, max_episode_steps=6)
    env.reset(seed=0)
    for _ in range(12):
        env.step(actions)


@pytest.mark.parametrize(("own", "limit"), [(None, 7), (5, 5), (900, 7)])
def test_smallest_episode_limit_applies_to_simulators(own, limit):
    """The smallest limit applies: of the environment (default or configured) or of evaluations."""
    config = EnvConfig(target=POLES["_target_"], backend="tensor", max_episode_steps=own)
    env = make_third_party_env(config, 2, training=False, max_episode_steps=7)
    env.reset(seed=0)
    ends = []
    for step in range(limit):  # alternate, so that no pole falls so soon
        *_, terminated, truncated, _ = env.step(np.full(2, step % 2))
        assert not terminated.any()
        ends.append(bool(truncated.all()))
    assert ends == [False] * (limit - 1) + [True]


def test_observation_sizes_become_spaces():
    """Observation sizes can be a number, a shape, or a dict of them, as in Brax and Playground."""
    found = space_of_size({"state": 3, "seen": {"depth": (2, 4)}})
    assert [*found] == ["seen", "state"]
    assert found["state"].shape == (3,)
    assert found["seen"]["depth"].shape == (2, 4)


def test_simulator_ids_select_the_backend():
    """Ids of JAX environments select the backend; the error for wrong names lists valid forms."""
    assert EnvConfig(id="brax:ant", device="cpu").backend == "tensor"
    with pytest.raises(ConfigError, match=r"device.*is for simulators"):
        EnvConfig(id="CartPole-v1", device="cpu")
    with pytest.raises(ConfigError, match="brax:<name>, gymnax:<name>, playground:<name>"):
        make_simulator("CartPole-v1", None, {}, 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_functional_simulators_pass_their_checks():
    """Run in a separate process, since a process that used JAX cannot fork."""
    pytest.importorskip("jax")
    checks = Path(__file__).with_name("functional_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", str(checks)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout
