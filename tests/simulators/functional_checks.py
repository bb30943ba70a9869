"""Checks of functional JAX environments, run by `test_simulators.py` in a process."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from tensor_sims import Point

from maze_train import EnvError
from maze_train.core.step_end import StepEnd
from maze_train.envs.factory import SimulatorEnv
from maze_train.simulators.make import make_simulator


def test_functional_episodes_are_those_of_a_loop():
    """Each episode starts with a distinct key; ends, limits and final observations match a loop."""
    num_envs, simulator = 3, make_simulator(None, "tensor_sims.Point", {}, 3)
    seen = [simulator.reset(7)]
    actions = torch.linspace(-1, 1, 40 * num_envs).view(40, num_envs, 1)
    steps = [simulator.step(action) for action in actions]
    assert steps[0].obs.dtype == torch.float32
    env, root = Point(), jax.random.PRNGKey(7)
    begin, advance = jax.jit(env.reset), jax.jit(env.step)
    ends = {"terminated": 0, "truncated": 0}
    for i in range(num_envs):
        episode, state, length = 0, None, 0
        for t, step in enumerate(steps):
            if state is None:
                key = jax.random.fold_in(jax.random.fold_in(root, i), episode)
                state, length = begin(key), 0
                before = seen[0] if t == 0 else steps[t - 1].obs
                np.testing.assert_allclose(before[i], state.obs, rtol=1e-6)
            state, length = advance(state, np.asarray(actions[t, i])), length + 1
            terminated = bool(state.done)
            truncated = length == 6 and not terminated
            assert (step.end[i] == StepEnd.TERMINATED) == terminated
            assert (step.end[i] == StepEnd.TRUNCATED) == truncated
            np.testing.assert_allclose(step.rewards[i], state.reward, rtol=1e-6)
            np.testing.assert_allclose(step.final_obs[i], state.obs, rtol=1e-6)
            if terminated or truncated:
                ends["terminated" if terminated else "truncated"] += 1
                episode, state = episode + 1, None
    assert min(ends.values()) > 3


def test_a_class_with_the_interface_of_gymnax():
    """The limit of a gymnax environment truncates; observations match its functions."""
    simulator = make_simulator(None, "tensor_sims.GymnaxPoint", {}, 3)
    first = simulator.reset(0)
    back = torch.full((3, 1), -10.0)  # the points do not move
    steps = [simulator.step(back) for _ in range(6)]
    torch.testing.assert_close(steps[4].obs[:, 0], first[:, 0])
    assert [bool((step.end == StepEnd.TRUNCATED).all()) for step in steps] == [False] * 5 + [True]
    assert not any((step.end == StepEnd.TERMINATED).any() for step in steps)


def test_a_functional_state_continues_exactly():
    """A saved state continues exactly in another simulator; a different size raises an error."""
    one, other = (make_simulator(None, "tensor_sims.Point", {}, 3) for _ in range(2))
    action = torch.ones(3, 1)
    one.reset(1)
    for _ in range(8):
        one.step(action)
    other.reset(2)
    other.load_state_dict(one.state_dict())
    for _ in range(8):
        assert torch.equal(one.step(action).obs, other.step(action).obs)
    fewer = make_simulator(None, "tensor_sims.Point", {}, 2)
    with pytest.raises(EnvError, match="does not fit 2 environments"):
        fewer.load_state_dict(one.state_dict())


def test_pictures_are_those_of_the_episode():
    """Pictures show the states of the episode; the last one shows its end."""
    env = SimulatorEnv(make_simulator(None, "tensor_sims.Point", {}, 1), "rgb_array")
    obs, _ = env.reset(seed=1)
    places = []
    for _ in range(6):
        places.append(int(100 * obs[0]))
        assert env.render().flatten().tolist() == [places[-1]] * 12
        obs, _, terminated, truncated, _ = env.step(np.zeros(1))
        if terminated or truncated:
            break
    assert env.render()[0, 0, 0] == places[-1]


def test_the_smallest_limit_holds():
    """The smaller of the configured limit and the evaluation limit truncates."""
    simulator = make_simulator(None, "tensor_sims.Point", {}, 2, max_episode_steps=2, at_most=3)
    simulator.reset(0)
    back = torch.full((2, 1), -10.0)  # the points do not move
    ends = [bool((simulator.step(back).end == StepEnd.TRUNCATED).all()) for _ in range(2)]
    assert ends == [False, True]
