"""Reference replay buffer, a list of rows of steps, and streams of random transitions for tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from step_ends import ends_of

from maze_train.core.step_end import StepEnd
from maze_train.core.types import tree_map
from maze_train.data.replay import UniformReplayBuffer, rollout_of_step
from maze_train.data.rollout import Rollout
from maze_train.spaces.columns import storage_dtype

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float64)
DICT = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 3), np.uint8),
        "level": spaces.Discrete(1000),
        "speed": spaces.Box(-1.0, 1.0, (1,), np.float32),
    }
)
BOX_ACTION = torch.zeros(2)
FRAME = (2, 3)
KINDS = ("terminated", "truncated", "both", "ignored")
WITH_WAITING = (*KINDS, "waiting", "waiting", "waiting", "waiting")
"""Kinds of rows, including rows in which an agent waits, as `TurnSplitter` returns them."""
DICT_ACTION = {"move": torch.zeros((), dtype=torch.int64), "turn": torch.zeros(3)}
SPACES = {"box": (BOX, BOX_ACTION), "dict": (DICT, DICT_ACTION)}


@dataclass
class Step:
    """Step of one environment in one row."""

    obs: dict
    action: dict | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    final_obs: dict | None = None
    valid: bool = False
    waits: bool = False


class ReferenceReplay:
    """Replay buffer in plain Python that keeps every row and samples the last ones only."""

    def __init__(self, rows, num_envs, n_steps, gamma):
        self.rows, self.num_envs, self.n_steps, self.gamma = rows, num_envs, n_steps, gamma
        self.steps = []
        self.continues = False

    def add(self, rows):
        """Add rows `[T + 1][B]` of steps; the last row has observations only."""
        if self.continues:
            self.steps.pop()
        self.steps += rows
        self.continues = True

    def interrupt(self):
        self.continues = False

    def transitions(self):
        """Return all transitions that can be sampled, by row and environment."""
        first = max(0, len(self.steps) - 1 - self.rows)
        return [
            self.walk(row, env)
            for row in range(first, len(self.steps))
            for env in range(self.num_envs)
            if self.steps[row][env].valid
        ]

    def walk(self, row, env):
        """Return obs, action, reward, discount, next_obs of the n-step transition from a row on."""
        start = self.steps[row][env]
        reward, discount = 0.0, 1.0
        for taken in self.rows_from(row, env):
            step = self.steps[taken][env]
            reward += discount * step.reward
            discount *= self.gamma
            next_obs = self.after(taken, env)
            if step.terminated:
                discount = 0.0
        return start.obs, start.action, reward, discount, next_obs

    def rows_from(self, row, env):
        """Return the rows of up to n steps of an episode, without rows in which the agent waits."""
        found = []
        while len(found) < self.n_steps:
            step = self.steps[row][env]
            if not step.valid and not step.waits:
                break
            found += [row] if step.valid else []
            if step.terminated or step.truncated:
                break
            row += 1
        return found

    def after(self, row, env):
        """Return the observation after a step."""
        step = self.steps[row][env]
        return self.steps[row + 1][env].obs if step.final_obs is None else step.final_obs


class Stream:
    """Stream of random steps with distinct observations (8-bit values repeat after 251)."""

    def __init__(
        self, rng, num_envs, space=BOX, action=BOX_ACTION, ends=0.3, kinds=KINDS, frame_stack=None
    ):
        self.rng, self.num_envs, self.ends, self.kinds = rng, num_envs, ends, kinds
        self.frame_stack = frame_stack or {}
        self.space, self.action = space, action
        self.counter = 0
        self.obs = [self.first_obs(env) for env in range(num_envs)]

    def first_obs(self, env):
        """Return the first observation of an episode; the frames of a stack differ."""
        obs = self.new_obs()
        for key, n in self.frame_stack.items():
            obs[key] = np.stack([obs[key][0] + frame for frame in range(n)]).astype(obs[key].dtype)
        return obs

    def next_obs(self, env):
        """Return the observation after a step; frame stacks continue."""
        obs = self.new_obs()
        for key in self.frame_stack:
            obs[key] = np.concatenate([self.obs[env][key][1:], obs[key][-1:]])
        return obs

    def new_obs(self):
        self.counter += 1
        leaves = self.space.spaces if isinstance(self.space, spaces.Dict) else {"": self.space}
        return {key: self.new_leaf(leaf.shape, storage_dtype(leaf)) for key, leaf in leaves.items()}

    def new_leaf(self, shape, dtype):
        return np.full(shape, self.counter % 251 if dtype == np.uint8 else self.counter, dtype)

    def new_action(self):
        leaves = self.action if isinstance(self.action, dict) else {"": self.action}
        return {
            key: torch.from_numpy(self.rng.integers(0, 99, tuple(x.shape))).to(x.dtype)
            for key, x in leaves.items()
        }

    def interrupt(self):
        self.obs = [self.first_obs(env) for env in range(self.num_envs)]

    def steps(self, num_steps):
        """Return `num_steps` rows and a last row of observations, `[T + 1][B]`."""
        rows = [[self.step(env) for env in range(self.num_envs)] for _ in range(num_steps)]
        return [*rows, [Step(obs) for obs in self.obs]]

    def rollout(self, rows):
        """Return rows of steps as a rollout."""
        return rollout_of(rows, self.space, self.action)

    def step(self, env):
        """Return a random step of one environment: any end, or a row that is not a transition."""
        kind = "continues"
        if self.rng.random() < self.ends:
            kind = self.rng.choice(self.kinds)
        step = Step(self.obs[env], self.new_action(), float(self.rng.normal()))
        if kind == "waiting":  # has the observation of the next turn
            step.waits = True
            return step
        step.valid = kind != "ignored"
        step.terminated = kind in ("terminated", "both")
        step.truncated = kind in ("truncated", "both")
        self.obs[env] = self.next_obs(env)
        if step.truncated:
            step.final_obs = self.obs[env]
        if kind != "continues":
            self.obs[env] = self.first_obs(env)
        return step


class StackStream(Stream):
    """Stream of observations with a stack of frames under `image` and a scalar under `level`."""

    def __init__(self, rng, num_envs, n=3, padding="random", skipping=0.1, **settings):
        self.padding, self.skipping = padding, skipping
        self.image = spaces.Box(0, 255, (n, *FRAME), np.uint8)
        level = spaces.Box(-np.inf, np.inf, ())
        space = spaces.Dict({"image": self.image, "level": level})
        super().__init__(rng, num_envs, space, frame_stack={"image": n}, **settings)

    def new_frame(self):
        return self.rng.integers(0, 256, FRAME, np.uint8)

    def first_obs(self, env):
        obs, frame = self.new_obs(), self.new_frame()
        image = np.stack([self.new_frame() for _ in obs["image"]])
        if self.padding == "repeat":
            image[:] = frame
        elif self.padding == "zero":
            image[:-1] = 0
        return {**obs, "image": image}

    def next_obs(self, env):
        obs, image = self.new_obs(), self.obs[env]["image"]
        for _ in range(1 + (self.rng.random() < self.skipping)):
            image = np.concatenate([image[1:], self.new_frame()[None]])
        return {**obs, "image": image}


def stacked(tree_rows, has_keys):
    """Leaves of `[T][B]` trees as tensors `[T, B, ...]`."""
    leaves = {
        key: torch.from_numpy(
            np.array([[np.asarray(tree[key]) for tree in row] for row in tree_rows])
        )
        for key in tree_rows[0][0]
    }
    return leaves if has_keys else leaves[""]


def rollout_of(rows, space=BOX, action=BOX_ACTION):
    """Return rows of steps as a rollout."""
    steps = rows[:-1]
    has_obs_keys, has_action_keys = isinstance(space, spaces.Dict), isinstance(action, dict)

    def column(read, dtype):
        return torch.tensor([[read(step) for step in row] for row in steps], dtype=dtype)

    finals = [
        (t * len(row) + env, step.final_obs)
        for t, row in enumerate(steps)
        for env, step in enumerate(row)
        if step.final_obs is not None
    ]
    finals = finals[::-1]  # any order is allowed
    obs = stacked([[step.obs for step in row] for row in rows], has_obs_keys)
    final_obs = tree_map(lambda x: x[0, :0], obs)
    if finals:
        final_obs = tree_map(lambda x: x[0], stacked([[obs for _, obs in finals]], has_obs_keys))
    valid = column(lambda step: step.valid, torch.bool)
    waits = column(lambda step: step.waits, torch.bool)
    ends = (column(lambda step, k=k: getattr(step, k), torch.bool) for k in KINDS[:2])
    end = ends_of(*ends, ~valid).masked_fill(waits, StepEnd.WAITING)
    return Rollout(
        obs=obs,
        actions=stacked([[step.action for step in row] for row in steps], has_action_keys),
        rewards=column(lambda step: step.reward, torch.float32),
        end=end,
        final_obs=final_obs,
        final_positions=torch.tensor([position for position, _ in finals], dtype=torch.int64),
    )


def rollout_of_one(step, next_obs):
    """Return a rollout with a single step."""

    def tree(leaves):
        leaves = {key: torch.as_tensor(leaf) for key, leaf in leaves.items()}
        return leaves.get("", leaves)

    ends = {"terminated": step.terminated, "truncated": step.truncated}
    return rollout_of_step(tree(step.obs), tree(step.action), step.reward, tree(next_obs), **ends)


def make(rows, num_envs, kind="box", *, buffer=UniformReplayBuffer, seed=0, stream=(), **settings):
    """Return a buffer, its reference and a stream of steps for both."""
    rng, stream = np.random.default_rng(seed), dict(stream)
    if kind == "stacks":
        stream = StackStream(rng, num_envs, **stream)
        settings = {"frame_stack": {"image": stream.image.shape[0]}, **settings}
    else:
        stream = Stream(rng, num_envs, *SPACES[kind], **stream)
    settings = {"num_envs": num_envs, "gamma": 0.9, "n_steps": 1, **settings}
    made = buffer(rows * num_envs, stream.space, stream.action, **settings)
    return made, ReferenceReplay(rows, num_envs, settings["n_steps"], settings["gamma"]), stream


def filled(*arguments, lengths=(7, 30, 5), **settings):
    """Return the same as `make`, with rollouts of these lengths added."""
    made = make(*arguments, **settings)
    for _ in added(*made, lengths):
        pass
    return made


def added(buffer, reference, stream, lengths):
    """Add rollouts of these lengths to both buffers (-1: an interruption); yield after each."""
    for length in lengths:
        if length < 1:
            for owner in (buffer, reference, stream):
                owner.interrupt()
            continue
        steps = stream.steps(length)
        buffer.add_rollout(stream.rollout(steps))
        reference.add(steps)
        yield steps


def everything(buffer):
    """Return all transitions of a buffer, by row and environment."""
    memory = buffer._memory
    positions = np.arange(memory.oldest * buffer.num_envs, memory.head * buffer.num_envs)
    positions = positions[memory.is_transition(positions)]
    return buffer._transitions(positions, buffer._walker.walk(positions))


def assert_equal_to(found, expected):
    """Check transitions against a reference; terminal steps may have any next observation."""
    assert len(found.indices) == len(expected)
    for i, (obs, action, reward, discount, next_obs) in enumerate(expected):
        assert_same_leaves(found.obs, i, obs)
        assert_same_leaves(found.actions, i, action)
        assert abs(found.rewards[i] - reward) < 1e-5
        assert abs(found.discounts[i] - discount) < 1e-6
        if discount:
            assert_same_leaves(found.next_obs, i, next_obs)


def assert_same_leaves(tree, i, expected):
    """Check that entry i of a tree equals the expected values by key."""
    leaves = tree if isinstance(tree, dict) else {"": tree}
    assert leaves.keys() == expected.keys()
    for key, leaf in leaves.items():
        assert np.array_equal(leaf[i].numpy(), np.asarray(expected[key]))
