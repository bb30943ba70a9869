"""DQN: updates match a slow reference in float64; known values; exploration."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_sac import row_of, tagged
from update_problems import BOX, PARTS, SMALL, perturbed, random_obs

from maze_train import load_policy, train
from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.dqn.learner import DQNEvents, DQNLearner
from maze_train.algorithms.dqn.model import DuelingNet, build_dqn
from maze_train.core.events import Statistics
from maze_train.data.replay import Transitions
from maze_train.learner.config import Progress
from maze_train.nets.config import ModelConfig
from maze_train.spaces.describe import flat_space

N, ACTIONS = 6, 3
MASKED = spaces.Dict({"pose": BOX, "action_mask": spaces.MultiBinary(ACTIONS)})
CHOICE = spaces.Discrete(ACTIONS, start=2)
SETTINGS: dict[str, Any] = {"lr": 0.02, "max_grad_norm": 0.0, "target_update_interval": 2}


def make_model(observation_space, dueling=False, num_quantiles=0):
    """Return a small model whose target differs from the Q-network."""
    config = ModelConfig(hidden_sizes=[6, 5], branch_size=3)
    model = build_dqn(config, observation_space, CHOICE, 1, dueling, num_quantiles)
    return perturbed(model.double(), size=0.5)


def make_batch(observation_space, seed, weights):
    """Return n-step transitions; sample 0 ends in a state without legal actions."""
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = (random_obs(flat_space(observation_space), (N,), generator) for _ in range(2))
    if observation_space is MASKED:
        for i, leaves in enumerate((obs, next_obs)):
            mask = torch.rand(N, ACTIONS, generator=generator) < 0.5
            mask[range(N), torch.randint(ACTIONS, (N,), generator=generator)] = True
            mask[0] &= i == 0
            leaves["action_mask"] = mask.to(torch.int8)
    return Transitions(
        obs=obs,
        actions=torch.randint(ACTIONS, (N,), generator=generator),
        rewards=2.0 * torch.randn(N, generator=generator),
        discounts=torch.tensor([0.0, 0.9, 0.81, 0.729, 0.9, 0.9]),
        next_obs=next_obs,
        indices=torch.arange(N),
        weights=torch.rand(N, generator=generator) if weights else None,
    )


def slow_returns(net, obs, size):
    """Return the value or the quantiles of each action as scalars with a graph."""
    if not isinstance(net, DuelingNet):
        outputs = [*net(obs)[0]]
        return [outputs[a * size : (a + 1) * size] for a in range(ACTIONS)]
    features = net.shared(obs)
    states, outputs = [*net.value(features)[0]], [*net.advantages(features)[0]]
    means = [sum(outputs[i::size]) / ACTIONS for i in range(size)]
    return [
        [states[i] + outputs[a * size + i] - means[i] for i in range(size)] for a in range(ACTIONS)
    ]


def slow_huber(error):
    """Return the Huber loss with threshold 1."""
    return error**2 / 2 if abs(float(error.detach())) <= 1.0 else abs(error) - 0.5


class SlowDQN:
    """Algorithm 1 of the paper, computed sample by sample with a plain optimizer."""

    def __init__(self, model, config):
        self.config, self.t = config, 0
        self.online, self.frozen = copy.deepcopy((model.policy, model.target_policy))
        eps = config.optimizer["eps"]
        self.optimizer = torch.optim.Adam(self.online.parameters(), config.lr, eps=eps)

    @torch.no_grad()
    def targets(self, batch, next_obs, legal, i):
        """Return the target value of sample i, or its target quantiles."""
        size = self.config.num_quantiles or 1
        reward, discount = float(batch.rewards[i]), float(batch.discounts[i])
        if not legal:
            return [reward] * size
        frozen = slow_returns(self.frozen, next_obs, size)
        judged = slow_returns(self.online, next_obs, size) if self.config.double_q else frozen
        best = max(legal, key=lambda a: float(sum(judged[a])))
        return [reward + discount * float(value) for value in frozen[best]]

    def loss(self, found, targets):
        """Return the loss of one sample for its value or quantiles."""
        size = self.config.num_quantiles
        if not size:
            error = found[0] - targets[0]
            return error**2 / 2 if self.config.loss == "squared" else slow_huber(error)
        loss = 0.0
        for i, quantile in enumerate(found):
            for y in targets:
                share = (i + 0.5) / size
                loss += slow_huber(y - quantile) * (share if y > quantile else 1 - share) / size
        return loss

    def step(self, batch):
        """Apply one gradient step; return the statistics by tag, and the TD errors."""
        loss, errors, values = 0.0, [], []
        for i in range(N):
            obs, next_obs = (dict_of(row_of(part, i)) for part in (batch.obs, batch.next_obs))
            mask = next_obs.pop("action_mask", torch.ones(1, ACTIONS))
            obs.pop("action_mask", None)
            legal = [a for a in range(ACTIONS) if mask[0, a]]
            targets = self.targets(batch, next_obs.get("", next_obs), legal, i)
            everything = slow_returns(self.online, obs.get("", obs), len(targets))
            found = everything[int(batch.actions[i])]
            weight = 1.0 if batch.weights is None else float(batch.weights[i])
            loss = loss + self.loss(found, targets) * weight / N
            values.append([float(value.detach()) for value in found])
            errors.append((float(sum(found).detach()) - sum(targets)) / len(targets))
        gradients = torch.autograd.grad(loss, [*self.online.parameters()])
        for param, gradient in zip(self.online.parameters(), gradients, strict=True):
            param.grad = gradient
        self.optimizer.step()
        self.t += 1
        if self.t % self.config.target_update_interval == 0:
            tau = self.config.tau
            pairs = zip(self.frozen.parameters(), self.online.parameters(), strict=True)
            for a, b in pairs:
                a.data.copy_((1 - tau) * a + tau * b)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        found = {"critic_loss": loss, "critic_value": np.mean(values), "grad_norm": norm}
        return tagged({**found, "gradient_steps": 1, "learning_rate": self.config.lr}), errors


def dict_of(obs):
    """Return observations as a mapping; a single tensor gets the key ""."""
    return dict(obs) if isinstance(obs, dict) else {"": obs}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("space", "settings", "weights"),
    [
        (BOX, {}, False),
        (BOX, {"double_q": False}, True),
        (PARTS, {"dueling": True, "loss": "squared"}, True),
        (MASKED, {"tau": 0.3, "target_update_interval": 1}, False),
        (MASKED, {"double_q": False, "dueling": True}, True),
        (BOX, {"num_quantiles": 4}, False),
        (MASKED, {"num_quantiles": 3, "dueling": True}, True),
        (PARTS, {"num_quantiles": 2, "double_q": False}, True),
    ],
    ids=[
        *("double", "plain", "dueling", "masked", "masked, plain, dueling"),
        *("quantiles", "masked, dueling, quantiles", "plain, quantiles"),
    ],
)
def test_updates_match_the_papers(space, settings, weights):
    """Statistics, TD errors, parameters and targets match after each of five gradient steps."""
    config = DQNAlgorithmConfig(**{**SETTINGS, **settings})
    model = make_model(space, config.dueling, config.num_quantiles)
    reference, learner = SlowDQN(model, config), DQNLearner(model, config)
    largest = 0.0
    for step in range(5):
        batch = make_batch(space, step, weights)
        result = learner.update(batch, Progress())
        row = result.reduce()
        statistics, errors = reference.step(batch)
        largest = max(largest, *map(abs, errors))
        assert row == pytest.approx(statistics, rel=1e-7, abs=1e-12)
        found = result.kept["td_errors"]["default"].tolist() if weights else []
        assert weights or not result.kept
        assert found == pytest.approx([abs(e) for e in errors] if weights else [], rel=1e-9)
        pairs = [(model.policy, reference.online), (model.target_policy, reference.frozen)]
        for ours, theirs in pairs:
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-8, atol=1e-9)
    assert largest > 1.0  # reaches the linear range of the Huber loss


def test_batches_are_moved_to_the_learner_device():
    """Batches are moved to the learner's device, wherever a custom buffer stores them."""
    learner = DQNLearner(make_model(MASKED), DQNAlgorithmConfig(**SETTINGS), device="meta")
    batch = learner.preprocess("default", make_batch(MASKED, 0, weights=True), Statistics())
    leaves = [*batch.obs.values(), *batch.next_obs.values(), batch.rewards, batch.weights]
    assert {leaf.device.type for leaf in leaves} == {"meta"}


def test_unfreezing_keeps_target_network_frozen():
    """Unfreezing a module does not add its target network to the optimizer."""
    learner = DQNLearner(make_model(MASKED), DQNAlgorithmConfig(**SETTINGS))
    learner.add_module("again", make_model(MASKED), frozen=True)
    learner.freeze_module("again", frozen=False)
    sizes = {len(learner.get_optimizer(key).params) for key in ("default", "again")}
    assert len(sizes) == 1


def tripled(learner, module_id, batch, statistics):
    """Return three times the loss from a user-defined function."""
    return 3.0 * learner.compute_loss_for_module(module_id, batch, statistics)


class Tripled(DQNLearner):
    """Learner with a custom loss that requires autograd."""

    factor = 3.0

    def compute_loss_for_module(self, *args):
        return self.factor * super().compute_loss_for_module(*args)


class Named(DQNLearner):
    """Subclass with the same loss."""


class Ordinary(Tripled):
    """Learner that computes the original loss with autograd."""

    factor = 1.0


@pytest.mark.parametrize("loss", ["huber", "squared"])
@pytest.mark.parametrize(("space", "weights"), [(BOX, False), (PARTS, True)])
def test_analytic_gradients_match_autograd(space, weights, loss):
    """Analytic gradients of linear layers match autograd, also in a subclass without a new loss."""
    norms = {}
    for learner_class in (DQNLearner, Named, Ordinary, Tripled):
        model = make_model(space).float()
        learner = learner_class(model, DQNAlgorithmConfig(**{**SETTINGS, "loss": loss}))
        batch = make_batch(space, 0, weights)
        norms[learner_class] = learner.update(batch, Progress()).reduce()["train/grad_norm"]
        is_analytic = not learner.uses_autograd("default")
        assert is_analytic == (learner_class in (DQNLearner, Named))
    node = {"_target_": f"{__name__}.tripled"}
    config = DQNAlgorithmConfig(**{**SETTINGS, "loss": loss, "loss_function": node})
    learner = DQNLearner(make_model(space).float(), config)
    norms["own"] = learner.update(make_batch(space, 0, weights), Progress()).reduce()
    assert norms[DQNLearner] == norms[Named]
    assert norms[DQNLearner] == pytest.approx(norms[Ordinary], rel=1e-6)
    assert norms[Tripled] == pytest.approx(3.0 * norms[Ordinary], rel=1e-6)
    assert norms["own"]["train/grad_norm"] == pytest.approx(norms[Tripled], rel=1e-6)


# -- known values --------------------------------------------------------------------------------


# -- exploration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("space", [BOX, MASKED], ids=["all legal", "masked"])
def test_actions_are_epsilon_greedy(space, epsilon):
    """Exploratory actions are uniform over legal actions; the mode is always the greedy action."""
    model = make_model(space).float()
    model.epsilon.fill_(epsilon)
    obs = make_batch(space, 0, False).obs
    with torch.no_grad():
        params = model.policy_params(obs)
        values = model.policy(model.inputs(obs))
    mask = obs["action_mask"].bool() if space is MASKED else torch.ones(N, ACTIONS).bool()
    probs = epsilon * mask / mask.sum(-1, keepdim=True)
    best = values.masked_fill(~mask, -math.inf).argmax(-1)
    probs[range(N), best] += 1.0 - epsilon
    family = model.distribution
    torch.testing.assert_close(params.softmax(-1), probs, rtol=1e-5, atol=1e-7)
    assert bool(((params.softmax(-1) == 0) == (probs == 0)).all())
    assert torch.equal(family.mode(params), best)
    noise = family.draw_noise((20_000, N), torch.Generator().manual_seed(0))
    actions = family.sample(params, noise)
    found = torch.nn.functional.one_hot(actions, ACTIONS).float().mean(0)
    torch.testing.assert_close(found, probs, rtol=0, atol=0.015)


def test_epsilon_follows_its_schedule(tmp_path):
    """Every event is reported, and a saved policy has the epsilon of its epoch."""
    epsilon = {"points": [[0, 1.0], [32, 0.5], [64, 0.25]], "by": "env_steps"}
    settings = {**SMALL, "algorithm.epsilon": epsilon}
    result = train("CartPole-v1", "dqn", run_dir=tmp_path / "run", **settings)
    # Epochs of 16 steps; the last update of each begins 2 steps before its end.
    found = [row["train/epsilon"] for row in result.history]
    assert found == pytest.approx([1.0 - 14 / 64, 1.0 - 30 / 64, 0.5 - 14 / 128, 0.5 - 30 / 128])
    row = result.history[-1]
    assert {event.tag for event in DQNEvents.events()} - row.keys() == {
        *("train/skipped_steps", "train/zeroed_gradients", "train/loss", "train/compile_s")
    }
    assert all(math.isfinite(value) for row in result.history for value in row.values())
    model: Any = result.policy.model

    assert float(model.epsilon) == found[result.summary.best_epoch - 1]


def test_saved_dqn_policy_acts_greedily(tmp_path):
    """Sampled actions explore with epsilon, as in training."""
    env = {"id": "CartPole-v1"}
    train(env, "dqn", run_dir=tmp_path / "run", **SMALL, **{"algorithm.epsilon": 0.8})
    policy, obs = load_policy(tmp_path / "run"), np.full((200, 4), 0.1, np.float32)
    model: Any = policy.model
    with torch.no_grad():
        best = int(model.policy(torch.from_numpy(obs[:1])).argmax())
    assert (policy.act(obs) == best).all()
    share = float((policy.act(obs, deterministic=False) == best).mean())
    assert share == pytest.approx(0.6, abs=0.1)


def test_dueling_streams_start_at_the_convolutions():
    """Each dueling stream starts with a dense layer on the convolutional features."""
    screens = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    net: Any = build_dqn(ModelConfig(), screens, CHOICE, 0, dueling=True).policy
    sizes = [[*layer.weight.shape] for s in (net.value, net.advantages) for layer in s.layers]
    features = net.shared.encoder.output_size
    assert sizes == [[512, features], [1, 512], [512, features], [ACTIONS, 512]]
