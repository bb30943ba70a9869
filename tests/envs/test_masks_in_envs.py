"""Vector environments refuse a state in which no action is legal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from maze_train import SequentialVectorEnv, SubprocVectorEnv
from maze_train.envs.foreign import ForeignVectorEnv
from maze_train.errors import EnvError, SpaceError, WorkerError


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Two masked parts; the masks of step `bad_step` of episode `bad_episode` forbid one of them.

    Step 0 is the reset. An episode ends after 5 steps, with nothing legal in its last observation.
    """

    def __init__(
        self, bad_step: int | None = None, bad_episode: int = 0, bad_part: str = "x"
    ) -> None:
        masks = spaces.Dict({"x": spaces.MultiBinary(3), "y": spaces.Box(0, 1, (2, 2), np.int8)})
        self.observation_space = spaces.Dict(
            {"action_mask": masks, "position": spaces.Box(0, 9, (1,))}
        )
        self.action_space = spaces.Dict(
            {"x": spaces.Discrete(3), "y": spaces.MultiDiscrete([2, 2]), "z": spaces.Box(-1, 1)}
        )
        self.bad = (bad_episode, bad_step)
        self.bad_part = bad_part
        self.episode, self.t = -1, 0

    def observe(self) -> Any:
        masks = {"x": np.array([0, 1, 0], np.int8), "y": np.eye(2, dtype=np.int8)}
        if (self.episode, self.t) == self.bad:
            masks[self.bad_part] = masks[self.bad_part] * 0
            if self.bad_part == "y":
                masks["y"][0, 1] = 1
        if self.t == 5:
            masks = {key: 0 * mask for key, mask in masks.items()}
        return {"action_mask": masks, "position": np.array([self.t], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 0.0, self.t == 5, False, {}


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
    vector = SequentialVectorEnv([MaskedEnv] * 2)
    play(vector, 4)
    obs, _, terminated, _, infos = vector.step(actions(2))
    assert terminated.all()
    assert not infos["final_obs"][0]["action_mask/x"].any()
    assert obs["action_mask/x"].tolist() == [[0, 1, 0]] * 2
    play(vector, 20)


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ({"bad_step": 3}, 3, "failed at step 3 of the episode.*no action of part 'x' is legal: "),
        ({"bad_step": 0}, 0, "failed in the reset of the episode.*no action of part 'x' is legal"),
        (
            {"bad_step": 2, "bad_episode": 1, "bad_part": "y"},
            7,
            "failed at step 2 of the episode.*no action of choice 1 of part 'y' is legal: entries "
            "2 to 3 of the observation 'action_mask/y' are all 0",
        ),
        ({"bad_step": 0, "bad_episode": 1}, 5, "failed in the reset.*part 'x' is legal"),
    ],
)
def test_no_legal_action(settings: dict[str, Any], steps: int, message: str) -> None:
    """The error names environment, step, part and choice; not one step earlier."""
    vector = SequentialVectorEnv([MaskedEnv, lambda: MaskedEnv(**settings)])
    with pytest.raises(EnvError, match=rf"environment 1 {message}"):
        play(vector, steps)
    if steps:
        play(SequentialVectorEnv([lambda: MaskedEnv(**settings)]), steps - 1)


@pytest.mark.slow
def test_no_legal_action_in_a_worker() -> None:
    """The same error comes from a worker process, with the number of the environment."""
    vector = SubprocVectorEnv([MaskedEnv, lambda: MaskedEnv(bad_step=3)], n_workers=2)
    try:
        play(vector, 2)
        with pytest.raises(WorkerError, match=r"environment 1 failed at step 3.*of part 'x' is"):
            vector.step(actions(2))
    finally:
        vector.close()


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("bad_step", [0, 3])
def test_no_legal_action_in_a_vector_environment_of_others(
    mode: AutoresetMode, bad_step: int
) -> None:
    """The same in every autoreset mode; last observations need no legal action there either."""
    settings = {"bad_step": bad_step, "bad_episode": 1}
    makers = [MaskedEnv, lambda: MaskedEnv(**settings)]
    # Where the reset has a step of its own, the second episode begins one step later.
    steps = 5 + bad_step + (mode is AutoresetMode.NEXT_STEP)
    play(ForeignVectorEnv(SyncVectorEnv(makers, autoreset_mode=mode)), steps - 1)
    vector = ForeignVectorEnv(SyncVectorEnv(makers, autoreset_mode=mode))
    message = rf"environment 1 failed at step {bad_step} of its episode: no action of part 'x' is"
    with pytest.raises(EnvError, match=message):
        play(vector, steps)


class WrongMaskEnv(MaskedEnv):
    """A mask for actions that can not be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1, 1)


def test_a_mask_that_does_not_fit_is_told_at_once() -> None:
    """A layout that is wrong is an error before the first step."""
    with pytest.raises(SpaceError, match="has no Discrete or MultiDiscrete part"):
        SequentialVectorEnv([WrongMaskEnv])
