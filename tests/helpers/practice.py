"""Environments, policies and trainers for tests of the training loop."""

from __future__ import annotations

import random
from dataclasses import replace

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train import SequentialVectorEnv, load_config
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPO, PPOLearner
from maze_train.collect.collector import RolloutCollector
from maze_train.core.events import Statistics
from maze_train.learner.group import LearnerGroup
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig
from maze_train.training.config import EvaluationConfig
from maze_train.training.evaluators import Evaluator
from maze_train.training.outcome import Limits
from maze_train.training.trainer import Run, Trainer


class ShortOrLongEnv(gymnasium.Env):
    """Environment whose episodes end after 1 or 12 steps; rewards depend on the actions."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, success=False):
        self.success = success

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.length = int(self.np_random.choice([1, 12]))
        return self.observe(), {}

    def observe(self):
        return np.array([self.np_random.standard_normal(), self.t / 10], np.float32)

    def step(self, action):
        self.t += 1
        ended = self.t == self.length
        info = {"is_success": self.length == 12} if self.success and ended else {}
        return self.observe(), 1.0 + 0.25 * float(action), ended, False, info


class GreedyOfGlobals(ShortOrLongEnv):
    """Environment that draws from every global generator for its observations."""

    def observe(self):
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
        return super().observe() + np.float32(drawn)


class GreedyConstructor(GreedyOfGlobals):
    """Environment that draws from a global generator in its constructor."""

    def __init__(self):
        super().__init__()
        np.random.rand(3)  # noqa: NPY002


def make_model(seed=0, sharp=True):
    """Return a small policy; a sharp policy acts differently in different states."""
    env = ShortOrLongEnv
    config = ModelConfig(hidden_sizes=[8])
    model = build_actor_critic(config, env.observation_space, env.action_space, seed)
    if sharp:
        with torch.no_grad():
            for param in model.policy.parameters():
                param.mul_(30.0)
    return model


def vector(env, n):
    """Return n environments in this process."""
    return SequentialVectorEnv([env] * n)


def seed_globals(seed=0):
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def make_ppo(env=ShortOrLongEnv, model=None, algorithm=None, **services):
    """Return a PPO trainer on two environments, with 2 updates of 2 x 8 steps per epoch."""
    model = model or make_model(sharp=False)
    settings = {"n_rollout_steps": 8, "batch_size": 8, "n_optimization_epochs": 2, "lr": 3e-3}
    config = PPOAlgorithmConfig(epoch_length=2, **{**settings, **(algorithm or {})})
    learner = PPOLearner(model, config, seed=1)
    collector = RolloutCollector(vector(env, 2), 8, env_seed=3, action_seed=4)
    services = {"limits": Limits(n_epochs=3), **services}
    return PPO(make_run(config, model, LearnerGroup(learner), **services), collector=collector)


def make_run(algorithm, model, learners, evaluation_interval=1, **objects):
    """Return a run without a directory for settings of an algorithm."""
    config = load_config({"env": "CartPole-v1", "algorithm": algorithm.name})
    evaluation = EvaluationConfig(interval=evaluation_interval)
    config = replace(config, algorithm=algorithm, evaluation=evaluation)
    return Run(config=config, model=model, learners=learners, **objects)


class NoLearners:
    """Placeholder for learners in tests that do not use them."""

    def foreach_learner(self, function):
        return []

    def wait(self):
        return Statistics()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class CountingTrainer(Trainer):
    """Trainer that counts 10 steps per update without learning, and records its progress."""

    def __init__(self, epoch_length=2, model=None, on_update=None, **services):
        config = PPOAlgorithmConfig(epoch_length=epoch_length)
        super().__init__(make_run(config, model or nn.Linear(1, 1), NoLearners(), **services))
        self.seen, self.on_update = [], on_update

    @classmethod
    def build(cls, run):
        raise NotImplementedError

    def update_once(self, progress, statistics):
        self.seen.append(progress)
        if self.on_update:
            self.on_update(self, statistics)
        return 10

    @property
    def rows(self):
        """Rows of metrics."""
        return self.run.tracker.history


class ScriptedEvaluator(Evaluator):
    """Evaluator that returns the given scores in turn, then repeats the last one."""

    def __init__(self, scores=(0.0,), name="eval/episode_return_mean"):
        self.scores, self.name, self.calls, self.closed = list(scores), name, 0, 0

    def evaluate(self, policy):
        score = self.scores[min(self.calls, len(self.scores) - 1)]
        self.calls += 1
        return {self.name: score}

    def close(self):
        self.closed += 1
