"""Problems of a few steps with a known optimum, one for every kind of space.

Each is an example of an environment with such a space; the best return is always `STEPS`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from own_callbacks import StopAtReturn

from maze_train import train

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 3
"""Number of steps of an episode; the reward of each step is at most 1."""

QUIET = {"progress": "quiet", "plot": False, "tensorboard": False}


def learn(
    tmp_path: Path,
    env: Any,
    algorithm: Any,
    steps: int,
    episodes: int,
    enough: float = math.inf,
    **keys: Any,
) -> Any:
    """Train until the mean return of `episodes` greedy evaluation episodes is at least `enough`."""
    return train(
        callbacks=[StopAtReturn(enough)],
        env=env,
        algorithm=algorithm,
        evaluation={"n_episodes": episodes, "concurrency": episodes},
        tracking=QUIET,
        total_steps=steps,
        seed=0,
        run_dir=str(tmp_path / "run"),
        **keys,
    )


class Question(gymnasium.Env[Any, Any]):
    """Environment that asks three questions, one per step; the action is the answer.

    The reward is 1 for the right answer, else 0. The best return is 3; guessing gives 3 / n.
    Subclasses define both spaces and `ask`.
    """

    def ask(self) -> tuple[Any, int]:
        """Return a new observation and its answer."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        observation, self.answer = self.ask()
        return observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.answer)
        self.t += 1
        observation, self.answer = self.ask()
        return observation, reward, self.t == STEPS, False, {}


class BoxQuestion(Question):
    """Box: find the largest entry of a vector."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(4)

    def ask(self) -> tuple[Any, int]:
        answer = int(self.np_random.integers(4))
        vector = self.np_random.uniform(-1.0, 0.2, 4)
        vector[answer] = self.np_random.uniform(0.6, 1.0)
        return vector.astype(np.float32), answer


class ImageQuestion(Question):
    """Byte image: name the colour of a square at a random position."""

    action_space = spaces.Discrete(3)

    def __init__(self, channels_first: bool, size: int = 16) -> None:
        shape = (3, size, size) if channels_first else (size, size, 3)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.channels_first = channels_first
        self.size = size

    def ask(self) -> tuple[Any, int]:
        colour = int(self.np_random.integers(3))
        y, x = self.np_random.integers(self.size - 5, size=2)
        image = np.zeros((3, self.size, self.size), np.uint8)
        image[colour, y : y + 6, x : x + 6] = 255
        return image if self.channels_first else image.transpose(1, 2, 0), colour


class DiscreteQuestion(Question):
    """Discrete that starts at -2: name the category two places further."""

    observation_space = spaces.Discrete(5, start=-2)
    action_space = spaces.Discrete(5, start=-2)

    def ask(self) -> tuple[Any, int]:
        number = int(self.np_random.integers(5))
        return number - 2, (number + 2) % 5 - 2


class MultiDiscreteQuestion(Question):
    """MultiDiscrete: find the die with the larger value among three."""

    observation_space = spaces.MultiDiscrete([2, 2, 2], start=[1, -1, 0])
    action_space = spaces.Discrete(3)

    def ask(self) -> tuple[Any, int]:
        answer = int(self.np_random.integers(3))
        dice = np.array([1, -1, 0])
        dice[answer] += 1
        return dice, answer


class MultiBinaryQuestion(Question):
    """MultiBinary: find the lamp that is off."""

    observation_space = spaces.MultiBinary((2, 2))
    action_space = spaces.Discrete(4)

    def ask(self) -> tuple[Any, int]:
        answer = int(self.np_random.integers(4))
        lamps = np.ones((2, 2), np.int8)
        lamps.flat[answer] = 0
        return lamps, answer


class DictQuestion(Question):
    """Dict: choose one of four doors; one key is the floor, the other the side."""

    observation_space = spaces.Dict(
        {"floor": spaces.Discrete(2), "side": spaces.Box(-1.0, 1.0, (1,), np.float32)}
    )
    action_space = spaces.Discrete(4)

    def ask(self) -> tuple[Any, int]:
        floor, right = (int(x) for x in self.np_random.integers(2, size=2))
        side = self.np_random.uniform(0.3, 1.0, 1) * (1 if right else -1)
        return {"floor": floor, "side": side.astype(np.float32)}, 2 * floor + right


class TupleQuestion(Question):
    """Tuple: like `DictQuestion`, with one lamp per side and floors that start at 1."""

    observation_space = spaces.Tuple((spaces.Discrete(2, start=1), spaces.MultiBinary(2)))
    action_space = spaces.Discrete(4)

    def ask(self) -> tuple[Any, int]:
        floor, right = (int(x) for x in self.np_random.integers(2, size=2))
        lamps = np.array([1 - right, right], np.int8)
        return (floor + 1, lamps), 2 * floor + right


class NestedQuestion(Question):
    """Nested Dict and Tuple: like `DictQuestion`, with additional irrelevant entries."""

    observation_space = spaces.Dict(
        {
            "floor": spaces.Discrete(2),
            "robot": spaces.Dict(
                {
                    "colour": spaces.Discrete(3),
                    "state": spaces.Tuple(
                        (spaces.MultiBinary(2), spaces.Box(-1.0, 1.0, (1,), np.float32))
                    ),
                }
            ),
        }
    )
    action_space = spaces.Discrete(4)

    def ask(self) -> tuple[Any, int]:
        floor, right, colour = (int(x) for x in self.np_random.integers([2, 2, 3]))
        side = self.np_random.uniform(0.3, 1.0, 1) * (1 if right else -1)
        lamps = self.np_random.integers(2, size=2).astype(np.int8)
        robot = {"colour": colour, "state": (lamps, side.astype(np.float32))}
        return {"floor": floor, "robot": robot}, 2 * floor + right


class Order(gymnasium.Env[Any, Any]):
    """Environment that gives three orders, one per step; an order is the index of an action.

    The reward of a discrete component is 1 if it equals the wanted value, else 0; the reward of a
    continuous component is 1 - |a - wanted|. Rewards are averaged, so the best return is 3.

    Args:
        action_space: The action space.
        wanted: Actions that can be ordered.
    """

    def __init__(self, action_space: spaces.Space[Any], wanted: list[Any]) -> None:
        self.action_space = action_space
        self.observation_space = spaces.Discrete(len(wanted))
        self.wanted = wanted

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.give_order(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = score(self.action_space, action, self.wanted[self.order])
        self.t += 1
        return self.give_order(), reward, self.t == STEPS, False, {}

    def give_order(self) -> int:
        """Return the next order."""
        self.order = int(self.np_random.integers(len(self.wanted)))
        return self.order


def score(space: spaces.Space[Any], action: Any, wanted: Any) -> float:
    """Return how well an action matches an order, at most 1."""
    if isinstance(space, spaces.Dict):
        return float(np.mean([score(space[key], action[key], wanted[key]) for key in space]))
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, action, wanted, strict=True)
        return float(np.mean([score(*part) for part in parts]))
    if isinstance(space, spaces.Box):
        return float(1.0 - np.abs(np.asarray(action) - np.asarray(wanted)).mean())
    return float(np.mean(np.asarray(action) == np.asarray(wanted)))


QUESTIONS = {
    "Box": BoxQuestion,
    "image, channels first": lambda: ImageQuestion(channels_first=True),
    "image, channels last": lambda: ImageQuestion(channels_first=False),
    "Discrete with start": DiscreteQuestion,
    "MultiDiscrete": MultiDiscreteQuestion,
    "MultiBinary": MultiBinaryQuestion,
    "Dict": DictQuestion,
    "Tuple": TupleQuestion,
    "nested Dict": NestedQuestion,
}
"""Problems by kind of observation space; all have Discrete actions."""

CORNERS = [np.array(pair) for pair in ([0.5, -0.5], [-0.5, 0.5], [0.6, 0.2], [-0.2, -0.6])]

ORDERS = {
    "Discrete with start": lambda: Order(spaces.Discrete(4, start=-1), [2, 0, -1, 1]),
    "MultiDiscrete": lambda: Order(
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, -1], [0, 5]]),
        [[[0, 1], [3, 6]], [[1, -1], [2, 5]], [[1, 0], [0, 6]]],
    ),
    "MultiBinary": lambda: Order(
        spaces.MultiBinary((2, 2)), [[[0, 1], [1, 1]], [[1, 0], [0, 1]], [[0, 0], [0, 0]]]
    ),
    "Box": lambda: Order(spaces.Box(-2.0, 2.0, (2,), np.float32), CORNERS),
    "Box, bounds per entry": lambda: Order(
        spaces.Box(np.float32([-2.0, -1.5]), np.float32([1.5, 3.0])), CORNERS
    ),
    "Box, one-sided": lambda: Order(spaces.Box(-1.5, np.inf, (2,), np.float32), CORNERS),
    "Box, unbounded": lambda: Order(spaces.Box(-np.inf, np.inf, (2,), np.float64), CORNERS),
    "Box, integer": lambda: Order(
        spaces.Box(-2, 2, (2,), np.int32), [[0, 1], [-1, 2], [2, -2], [1, 0]]
    ),
    "Box, two dimensions": lambda: Order(
        spaces.Box(-2.0, 2.0, (1, 2), np.float32), [c.reshape(1, 2) for c in CORNERS]
    ),
    "Dict": lambda: Order(
        spaces.Dict(
            {"gear": spaces.Discrete(3, start=1), "force": spaces.Box(-1.0, 2.0, (1,), np.float32)}
        ),
        [{"gear": 3, "force": -0.3}, {"gear": 1, "force": 0.6}, {"gear": 2, "force": 0.1}],
    ),
    "Tuple": lambda: Order(
        spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(3))),
        [([0, 1], 2), ([1, 1], 0), ([1, 0], 1)],
    ),
}
"""Problems by kind of action space; all have Discrete observations."""


class Recall(gymnasium.Env[Any, Any]):
    """Memory task: a signal shown at reset must be named when the lamp is lit, 3 to 5 steps later.

    Only the last action is rewarded: 1 for the right number, else 0. A policy without recurrent
    state can only guess, with a mean return of 1 / 3.
    """

    SIGNALS = 3

    observation_space = spaces.Dict(
        {"signal": spaces.Discrete(SIGNALS + 1), "lamp": spaces.MultiBinary(1)}
    )
    action_space = spaces.Discrete(SIGNALS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.signal = int(self.np_random.integers(self.SIGNALS))
        self.wait = int(self.np_random.integers(3, 6))
        self.t = 0
        return {"signal": self.signal + 1, "lamp": np.zeros(1, np.int8)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        has_ended = self.t == self.wait
        reward = float(has_ended and action == self.signal)
        self.t += 1
        lamp = np.full(1, self.t == self.wait, np.int8)
        return {"signal": 0, "lamp": lamp}, reward, has_ended, False, {}
