"""Vector environments refuse a state in which no action is legal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from toy_envs import CountingEnv
from vector_cases import ALL, FORKS, OTHER_MODES, here

from maze_train.core.errors import EnvError, SpaceError

pytestmark = FORKS


class MaskedEnv(CountingEnv):
    """Two masked parts; the masks of step `bad_step` of episode `bad_episode` forbid one of them.

    Step 0 is the reset. An episode ends after 5 steps, with nothing legal in its last observation.
    """

    def __init__(
        self, bad_step: int | None = None, bad_episode: int = 0, bad_part: str = "x"
    ) -> None:
        super().__init__()
        masks = spaces.Dict({"x": spaces.MultiBinary(3), "y": spaces.Box(0, 1, (2, 2), np.int8)})
        self.observation_space = spaces.Dict(
            {"action_mask": masks, "position": spaces.Box(0, 9, (1,))}
        )
        self.action_space = spaces.Dict(
            {"x": spaces.Discrete(3), "y": spaces.MultiDiscrete([2, 2]), "z": spaces.Box(-1, 1)}
        )
        self.bad = (bad_episode + 1, bad_step)
        self.bad_part = bad_part

    def observe(self) -> Any:
        masks = {"x": np.array([0, 1, 0], np.int8), "y": np.eye(2, dtype=np.int8)}
        if (len(self.seeds), self.t) == self.bad:
            masks[self.bad_part] = masks[self.bad_part] * 0
            if self.bad_part == "y":
                masks["y"][0, 1] = 1
        if self.t == 5:
            masks = {key: 0 * mask for key, mask in masks.items()}
        return {"action_mask": masks, "position": np.array([self.t], np.float32)}


def actions(n: int) -> dict[str, Any]:
    """Actions for n environments."""
    return {"x": np.ones(n, int), "y": np.ones((n, 2), int), "z": np.zeros((n, 1), np.float32)}


def play(vector: Any, steps: int) -> None:
    """Reset and take steps."""
    vector.reset(seed=0)
    for _ in range(steps):
        vector.step(actions(vector.num_envs))


def test_last_observations_need_no_legal_action() -> None:
    """Episodes end in states without legal actions, and the masks arrive as they are."""
    vector = here([MaskedEnv] * 2)
    play(vector, 4)
    obs, _, terminated, _, infos = vector.step(actions(2))
    assert terminated.all()
    assert not infos["final_obs"][0]["action_mask/x"].any()
    assert obs["action_mask/x"].tolist() == [[0, 1, 0]] * 2
    play(vector, 20)


@sweep(
    "case",
    [
        ({"bad_step": 0}, 0, "failed in the reset of the episode.*no action of part 'x' is legal"),
        (
            {"bad_step": 2, "bad_episode": 1, "bad_part": "y"},
            7,
            "failed at step 2 of the episode.*no action of choice 1 of part 'y' is legal: entries "
            "2 to 3 of the observation 'action_mask/y' are all 0",
        ),
    ],
)
def test_no_legal_action(case: tuple[dict[str, Any], int, str]) -> None:
    """The error names environment, step, part and choice."""
    settings, steps, message = case
    with pytest.raises(EnvError, match=rf"environment 1 {message}"):
        play(here([MaskedEnv, lambda: MaskedEnv(**settings)]), steps)


@pytest.mark.parametrize("make", [*ALL, *OTHER_MODES])
@sweep("bad_step", [0, 3])
def test_no_legal_action_wherever_environments_are(make: Any, bad_step: int) -> None:
    """In workers and in every autoreset mode, too; last observations need none there either."""
    message = rf"environment 1 failed (in the reset|at step {bad_step}) .*: no action of part 'x'"
    with make([MaskedEnv, lambda: MaskedEnv(bad_step, bad_episode=1)]) as vector:
        # Where the reset has its own step, the second episode begins one step later.
        delay = vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        play(vector, 4 + bad_step + delay)
        with pytest.raises(EnvError, match=message):
            vector.step(actions(2))


def test_a_mask_that_does_not_fit_is_told_at_once() -> None:
    """A layout that is wrong is an error before the first step."""
    env = MaskedEnv()
    env.action_space = spaces.Box(-1, 1)
    with pytest.raises(SpaceError, match="has no Discrete or MultiDiscrete part"):
        here([lambda: env])
