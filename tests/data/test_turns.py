"""Turns of agents match a loop over steps and agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces

from maze_train.core.step_end import StepEnd
from maze_train.data.replay import UniformReplayBuffer
from maze_train.data.rollout import Rollout
from maze_train.data.turns import TurnSplitter
from maze_train.functional.returns import discounts_and_lambdas, lambda_advantages
from maze_train.learner.reward_scaling import RewardScaler

AGENTS = ("a", "b", "c")
POLICIES = {"x": ["a", "c"], "y": ["b"]}
NUM_ENVS = 4
SPACE = spaces.Box(-np.inf, np.inf, ())


@dataclass
class Stream:
    """Random steps of environments whose agents act, wait and end at random.

    Observation t of agent i in environment e is `1000 * t + 10 * e + i`, plus 0.5 for the final
    observation of an episode.
    """

    obs: list[Any] = field(default_factory=list)
    acts: list[Any] = field(default_factory=list)
    rewards: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    """Ends of agents: 0 continues, 1 terminated, 2 truncated, 3 truncated in an unknown state."""
    next_acts: list[Any] = field(default_factory=list)
    """Agents that would act next if the joint episode continued."""
    joint: list[Any] = field(default_factory=list)
    """Ends of environments: 0 continues, 1 terminated, 2 truncated, 3 lost."""

    @classmethod
    def random(cls, num_steps: int, seed: int, acting: float = 0.5) -> Stream:
        rng, stream = np.random.default_rng(seed), cls()
        shape = NUM_ENVS, len(AGENTS)
        alive = np.ones(shape, bool)
        for t in range(num_steps + 1):
            acts = alive & (rng.random(shape) < acting)
            for e in range(NUM_ENVS):
                if not acts[e].any():
                    acts[e, rng.choice(np.flatnonzero(alive[e]))] = True
            stream.acts.append(acts)
            numbers = np.arange(NUM_ENVS)[:, None] * 10 + np.arange(len(AGENTS))
            stream.obs.append((1000.0 * t + numbers).astype(np.float32))
            ends = np.where(alive, rng.choice(4, shape, p=[0.89, 0.06, 0.03, 0.02]), 0)
            joint = rng.choice(4, NUM_ENVS, p=[0.92, 0.02, 0.04, 0.02])
            ends[joint == 3] = 0
            alive = alive & (ends == 0)
            joint = np.where((joint == 0) & ~alive.any(1), 1, joint)
            stream.next_acts.append(alive & (rng.random(shape) < 0.5))
            stream.rewards.append(np.round(rng.normal(size=shape), 3).astype(np.float32))
            stream.rewards[-1][joint == 3] = 0.0
            stream.ends.append(ends)
            stream.joint.append(joint)
            alive[joint > 0] = True
        return stream

    def rollout(self, start: int, stop: int) -> Rollout:
        """Return the joint rollout of some steps."""
        steps = range(start, stop)
        over = np.stack([self.joint[t] for t in steps])
        # If an episode ended, the next row is the first observation of the next episode.
        rows = [self._part(t, t - 1, final=False) for t in range(start, stop + 1)]
        found = [self._part(t, t, final=True) for t in steps]
        positions = np.flatnonzero((over == 1) | (over == 2))
        final = {
            key: torch.stack([part[key] for part in found]).flatten(0, 1)[positions]
            for key in found[0]
        }
        return Rollout(
            obs={key: torch.stack([row[key] for row in rows]) for key in rows[0]},
            actions={
                agent: torch.from_numpy(np.stack([self.obs[t][:, i] for t in steps])).long()
                for i, agent in enumerate(AGENTS)
            },
            rewards=torch.zeros(len(steps), NUM_ENVS),
            end=torch.from_numpy(over.astype(np.uint8)),
            final_obs=final,
            final_positions=torch.from_numpy(positions),
            log_probs=torch.from_numpy(np.stack([self.obs[t] for t in steps])),
        )

    def _part(self, t: int, step: int, *, final: bool) -> dict[str, torch.Tensor]:
        """Return observation t with the results of a step; `final` selects final observations."""
        shape = NUM_ENVS, len(AGENTS)
        over = np.zeros(NUM_ENVS, bool) if step < 0 else self.joint[step] > 0
        here = np.zeros(shape, bool) if step < 0 else np.repeat(~over[:, None], len(AGENTS), 1)
        if final:
            here = np.ones(shape, bool)
        obs = self.obs[t] + 1000.5 if final else self.obs[t]
        ends = np.where(here, self.ends[step], 0)
        numbers = {f"agents/{agent}": obs[:, i] for i, agent in enumerate(AGENTS)}
        flags = {
            "acts": self.next_acts[t] if final else self.acts[t],
            "rewards": np.where(here, self.rewards[step], 0.0).astype(np.float32),
            "terminated": (ends == 1) | (ends == 3),
            "truncated": ends >= 2,
        }
        return {key: torch.from_numpy(np.asarray(x).copy()) for key, x in (numbers | flags).items()}

    def turns(self, env: int, agent: int, stop: int) -> list[tuple[Any, ...]]:
        """Return observation, reward, end (3: lost) and next observation of each turn."""
        found: list[tuple[Any, ...]] = []
        running: list[Any] | None = None
        early, has_ended = 0.0, False
        for t in range(stop + 1):
            now = self.obs[t][env, agent]
            if self.acts[t][env, agent]:
                if running is not None:
                    found.append((*running, 0, now))
                running, early = [now, early], 0.0
            if t == stop:
                break
            end, joint = self.ends[t][env, agent], self.joint[t][env]
            if running is not None:
                running[1] += self.rewards[t][env, agent]
            elif not has_ended:
                early += self.rewards[t][env, agent]
            if not end and not joint:
                continue
            has_ended, early = not joint, 0.0
            if running is None:
                continue
            waits = joint == 2 and not end and not self.next_acts[t][env, agent]
            if joint == 3 or waits or end == 3:
                found.append((*running, 3, None))
            else:
                last = now + 1000.5 if joint else self.obs[t + 1][env, agent]
                found.append((*running, end or joint, last))
            running = None
        return found


def turns_of(rollouts: list[Rollout], column: int) -> list[tuple[Any, ...]]:
    """Return the turns in a column of the rollouts of a policy, as `Stream.turns` does."""
    found: list[tuple[Any, ...]] = []
    for rollout in rollouts:
        assert isinstance(rollout.obs, torch.Tensor)
        final = dict(zip(rollout.final_positions.tolist(), rollout.final_obs, strict=True))
        for row in range(rollout.num_steps):
            obs, reward = rollout.obs[row, column].item(), rollout.rewards[row, column].item()
            assert rollout.log_probs is not None
            end = int(rollout.end[row, column])
            if end > StepEnd.TRUNCATED:
                assert end in (StepEnd.DROPPED, StepEnd.WAITING)
                if (rollout.end[row:, column] <= StepEnd.TRUNCATED).any():
                    found.append((obs, 0.0, 3, None))
                continue
            assert rollout.log_probs[row, column] == obs
            after = rollout.obs[row + 1, column].item()
            if (at := row * rollout.num_envs + column) in final or end == StepEnd.TRUNCATED:
                after = final[at].item()
            found.append((obs, reward, end, after))
    return found


def split(
    stream: Stream, lengths: list[int], learns: Any = None, **layout: Any
) -> dict[str, list[Rollout]]:
    """Return the rollouts of the policies; the splitter is restored from its state after each."""
    make = partial(TurnSplitter, POLICIES, dict.fromkeys(AGENTS, 0), **layout)
    splitter, start = make(), 0
    found: dict[str, list[Rollout]] = {policy: [] for policy in POLICIES}
    for length in lengths:
        own = None if learns is None else learns[start : start + length + 1]
        part = splitter.split(stream.rollout(start, start + length), own)
        if layout.get("as_steps"):
            assert [part[policy].num_steps for policy in POLICIES] == [length] * 2
        kept = make()
        kept.load_state_dict(splitter.state_dict(), torch.zeros(NUM_ENVS, dtype=torch.bool))
        splitter, start = kept, start + length
        for policy, rollout in part.items():
            found[policy].append(rollout)
    return found


def learning(stream: Stream, num_steps: int, seed: int) -> torch.Tensor:
    """Return whether each agent learns from each episode, `[T + 1, E, A]`."""
    rng = np.random.default_rng(seed)
    rows = [rng.random((NUM_ENVS, len(AGENTS))) < 0.5]
    for t in range(num_steps):
        drawn = rng.random((NUM_ENVS, len(AGENTS))) < 0.5
        rows.append(np.where(np.asarray(stream.joint[t])[:, None] > 0, drawn, rows[-1]))
    return torch.from_numpy(np.stack(rows))


def test_aborted_episodes_drop_unfinished_turns() -> None:
    """The columns of other environments are unchanged."""
    splitter, restored = (TurnSplitter(POLICIES, dict.fromkeys(AGENTS, 0)) for _ in range(2))
    splitter.split(Stream.random(9, 26).rollout(0, 9))
    state, lost = splitter.state_dict(), torch.zeros(NUM_ENVS, dtype=torch.bool)
    lost[0] = True
    restored.load_state_dict(state, lost)
    for policy, columns in restored.state_dict().items():
        is_lost = lost.repeat(len(POLICIES[policy]))
        for name in ("acts", "rewards"):
            assert state[policy][name][:, is_lost].any()
            assert not columns[name][:, is_lost].any()
            assert torch.equal(columns[name][:, ~is_lost], state[policy][name][:, ~is_lost])


SOME = [7, 20, 3, 30]


@pytest.mark.parametrize("some_learn", [False, True], ids=["all", "some learn"])
@pytest.mark.parametrize("acting", everyday(1, [0.6, 1.0]))
@pytest.mark.parametrize(
    ("lengths", "layout"),
    everyday(
        2,
        [
            (SOME, {"as_steps": True}),
            (SOME, {"at_end": True, "keeps_terminal_obs": True}),
            ([1] * 60, {}),
        ],
        are_rows=True,
    ),
)
def test_turns_equal_a_loop_over_steps(
    lengths: list[int], layout: dict[str, bool], acting: float, some_learn: bool
) -> None:
    """Each turn appears once with its reward and end, for any lengths of rollouts.

    Rewards before the first turn of an episode are added to that turn.
    """
    for seed in range(5):
        stream = Stream.random(60, seed, acting)
        learns = learning(stream, 60, seed) if some_learn else None
        found = split(stream, lengths, learns, **layout)
        for policy, agents in {"x": [0, 2], "y": [1]}.items():
            for k, agent in enumerate(agents):
                for env in range(NUM_ENVS):
                    expected = [
                        turn
                        for turn in stream.turns(env, agent, 60)
                        if turn[2] != 3
                        and (learns is None or learns[int(turn[0]) // 1000, env, agent])
                    ]
                    given = [
                        turn for turn in turns_of(found[policy], k * NUM_ENVS + env) if turn[2] != 3
                    ]
                    assert [t[0] for t in given] == [t[0] for t in expected]
                    for got, want in zip(given, expected, strict=True):
                        assert got[1] == pytest.approx(want[1], abs=1e-5)
                        assert got[2] == want[2]
                        if want[2] != 1 or "keeps_terminal_obs" in layout:
                            assert got[3] == want[3]


@pytest.mark.parametrize("acting", everyday(1, [0.3, 1.0]))
@pytest.mark.parametrize(("lengths", "size"), [([1] * 60, 720), (SOME, 720), ([1] * 60, 80)])
def test_n_step_samples_sum_rewards_over_turns(
    lengths: list[int], size: int, acting: float
) -> None:
    """A replay buffer sums the rewards of three turns of an agent across rollouts.

    In the last case, the buffer has dropped some turns.
    """
    stream = Stream.random(60, 3, acting)
    found = split(stream, lengths, at_end=True)
    for policy, agents in POLICIES.items():
        columns = NUM_ENVS * len(agents)
        settings: dict[str, Any] = {"num_envs": columns, "n_steps": 3, "gamma": 0.5}
        buffer = UniformReplayBuffer(size, SPACE, torch.zeros((), dtype=torch.int64), **settings)
        for rollout in found[policy]:
            buffer.add_rollout(rollout)
        batch = buffer.sample_batch(4000)
        expected: dict[float, tuple[float, float, Any]] = {}
        for agent in agents:
            for env in range(NUM_ENVS):
                expected |= several_turns(stream.turns(env, AGENTS.index(agent), 60))
        seen = batch.obs.flatten().tolist()
        assert len(set(seen)) == len(buffer)
        assert len(buffer) == len(expected) if size == 720 else len(buffer) < len(expected)
        for i, obs in enumerate(seen):
            reward, discount, after = expected[obs]
            assert batch.rewards[i].item() == pytest.approx(reward, abs=1e-5)
            assert batch.discounts[i].item() == discount
            if discount:
                assert batch.next_obs[i].item() == after


def several_turns(turns: list[tuple[Any, ...]]) -> dict[float, tuple[float, float, Any]]:
    """Return n-step reward, discount and next observation of three turns, by observation."""
    found = {}
    for k, (obs, _, end, _) in enumerate(turns):
        if end == 3:
            continue
        reward, discount = 0.0, 1.0
        for _, own, last_end, after in turns[k : k + 3]:
            if last_end == 3:
                break
            reward, discount, seen = reward + discount * own, discount / 2, after
            if last_end:
                discount *= last_end == 2
                break
        found[obs] = reward, discount, seen
    return found


@pytest.mark.parametrize("acting", [0.3, 1.0])
@pytest.mark.parametrize("lengths", everyday(1, [[60], [1] * 60, SOME]))
def test_centralized_critics_see_all_observations_at_each_turn(
    lengths: list[int], acting: float
) -> None:
    """The critic sees all agents' observations at each turn, and after truncated turns.

    After a truncation, the same agents act as at the turn, except terminated ones.
    """
    count = 0
    for seed in range(2):
        stream = Stream.random(60, seed, acting)
        plain = split(stream, lengths)
        found = split(stream, lengths, centralized=["x"])
        assert turns_of(found["y"], 0) == turns_of(plain["y"], 0)
        for rollout, own in zip(found["x"], plain["x"], strict=True):
            assert torch.equal(rollout.obs["/own"], own.obs)
            for row, column in (own.end <= StepEnd.TRUNCATED).nonzero().tolist():
                place = row, column
                t, (agent, env) = int(own.obs[place]) // 1000, divmod(column, NUM_ENVS)
                agent *= 2
                seen = {key: leaf[place] for key, leaf in rollout.obs.items()}
                check_seen(seen, stream.obs[t][env], stream.acts[t][env], agent)
                position = row * own.num_envs + column
                if own.truncated[place]:
                    k = own.final_positions.tolist().index(position)
                    last = {key: leaf[k] for key, leaf in rollout.final_obs.items()}
                    value = float(last["/own"])
                    end = int(value - 1000.0) // 1000
                    shown = stream.obs[end + 1] if value % 1 == 0 else stream.obs[end] + 1000.5
                    goes_on = (stream.joint[end][env] != 1) | (stream.ends[end][env] == 2)
                    goes_on &= stream.ends[end][env] % 2 == 0
                    check_seen(last, shown[env], stream.acts[t][env] & goes_on, agent)
                    count += 1
    assert count > 9


def check_seen(seen: dict[str, torch.Tensor], obs: Any, acts: Any, agent: int) -> None:
    """Assert that an observation has all agents' observations, who acts, and the agent's index."""
    assert [float(seen[f"/joint/agents/{name}"]) for name in AGENTS] == obs.tolist()
    assert seen["/joint/acts"].tolist() == acts.tolist()
    assert seen["/joint/agent"] == agent
    assert seen["/own"] == obs[agent]


@pytest.mark.parametrize("lengths", [[60], [1] * 60, SOME])
def test_reward_sums_of_waiting_agents_continue(lengths: list[int]) -> None:
    """Waiting agents keep their running sum; lost turns reset it."""
    stream = Stream.random(60, seed=1)
    scaler = RewardScaler(gamma=0.9, clip=0.0)
    for rollout in split(stream, lengths)["x"]:
        scaler.scale(rollout.rewards, rollout.end)
    sums = []
    for agent in (0, 2):
        for env in range(NUM_ENVS):
            running = 0.0
            for _, reward, end, _ in stream.turns(env, agent, sum(lengths)):
                if end != 3:
                    running = reward + 0.9 * running
                    sums.append(running)
                running *= end == 0
    moments = scaler.moments
    found = [float(x) for x in (moments.count, moments.mean, moments.var)]
    assert found == pytest.approx([len(sums), np.mean(sums), np.var(sums)], rel=1e-6)


def test_advantages_of_turns_match_known_values() -> None:
    """Agents a and b act in turn; b ends in step 3, where a is truncated in a state of value 6.

    With discount 0.5, values 0 and lambda 1: a gets 1 + 2 for its first turn (2 from b's step) and
    4 + 8 for the second, so 12 + 0.5 * 6 = 15 and 3 + 0.5 * 15 = 10.5. b gets 10 + 20 + 30 and 40,
    so 40 and 60 + 0.5 * 40 = 80; the 10 precedes its first turn.
    """
    rewards = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 30.0], [8.0, 40.0]])
    acts = torch.tensor([[1.0, 0.0], [0.0, 1.0]] * 2 + [[1.0, 0.0]])
    none = torch.zeros(5, 2)
    rows = {"acts": acts, "rewards": none, "terminated": none, "truncated": none}
    rows = {key: row.unsqueeze(1).clone() for key, row in rows.items()}
    rows["rewards"][1:4, 0] = rewards[:3]
    final = {
        "agents/a": torch.tensor([6.0]),
        "agents/b": torch.tensor([9.0]),
        "acts": torch.tensor([[1.0, 0.0]]),
        "rewards": rewards[3:],
        "terminated": torch.tensor([[0.0, 1.0]]),
        "truncated": torch.zeros(1, 2),
    }
    numbers = torch.arange(5.0).unsqueeze(1)
    rollout = Rollout(
        obs={"agents/a": numbers, "agents/b": numbers, **rows},
        actions={"a": numbers[:4], "b": numbers[:4]},
        rewards=torch.zeros(4, 1),
        end=torch.tensor([[0]] * 3 + [[StepEnd.TRUNCATED]], dtype=torch.uint8),
        final_obs=final,
        final_positions=torch.tensor([3]),
    )
    found = TurnSplitter({"a": ["a"], "b": ["b"]}, {"a": 0, "b": 0}).split(rollout)
    for policy, expected in {"a": [10.5, 15.0], "b": [80.0, 40.0]}.items():
        turns = found[policy]
        discounts, lambdas = discounts_and_lambdas(turns.end, 0.5, 1.0)
        values = torch.zeros(2, 1)
        next_values = values.clone()
        next_values.view(-1)[turns.final_positions] = turns.final_obs
        advantages = lambda_advantages(turns.rewards, discounts, values, next_values, lambdas)
        assert advantages.flatten().tolist() == expected
    assert found["a"].obs.flatten().tolist()[:2] == [0.0, 2.0]
    assert found["b"].actions.flatten().tolist() == [1.0, 3.0]
