"""Soft actor-critics as a configuration describes them."""

from __future__ import annotations

import pytest
import torch
from soft_models import (
    PROBLEMS,
    N,
    build,
    observations,
    own,
    results,
)

from maze_train.distributions.beta import Beta
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.soft import SoftSample
from maze_train.nets.blocks import ImageEncoder
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
from maze_train.nets.critics import OwnCritics, TemplateCritics, build_soft_actor_critic
from maze_train.nets.template import DictEncoder


def build_by_default(name):
    """A model without any setting."""
    return build_soft_actor_critic(ModelConfig(), *PROBLEMS[name], 0)


def test_defaults():
    """Two hidden layers of 256 units, relu, PyTorch's weights, two critics."""
    model = build_by_default("box")
    layers = list(model.policy.net.layers.layers)
    assert [layer.out_features for layer in layers] == [256, 256, 4]
    shapes = {key: tuple(p.shape) for key, p in model.critics.layers.named_parameters()}
    weights = {"weight_0": (2, 5, 256), "weight_1": (2, 256, 256), "weight_2": (2, 256, 1)}
    assert {key: shape for key, shape in shapes.items() if "weight" in key} == weights
    assert type(model.distribution) is SquashedGaussian
    assert model.policy.free_params is None
    assert model.normalizer is None
    assert model.masking is None
    biases = [layer.bias.detach() for layer in layers]
    biases += [model.critics.layers.get_parameter(f"bias_{i}").detach() for i in range(3)]
    for bias, inputs in zip(biases, (3, 256, 256, 5, 256, 256), strict=True):
        assert bias.all(), "orthogonal weights come with biases of 0"
        assert float(bias.abs().max()) <= inputs**-0.5
    assert not model.training


def test_the_nonlinearity_is_relu():
    """With biases far below 0 all units of the first layer are off."""
    model = build_by_default("box")
    assert model.policy.net.layers.nonlinearity == "relu"
    params = dict(model.critics.layers.named_parameters())
    with torch.no_grad():
        params["bias_0"].fill_(-1e6)
        critics = params["bias_1"].relu() @ params["weight_2"] + params["bias_2"]
    torch.testing.assert_close(results(model, "box")[1], critics.expand(2, N, 1))


def test_settings_are_honoured():
    """Sizes, nonlinearity and initialisation are those of the configuration."""
    model = build(critic_hidden_sizes=[4], activation="tanh", orthogonal_init=True)
    layers = list(model.policy.net.layers.layers)
    assert [layer.out_features for layer in layers] == [6, 5, 4]
    assert not any(layer.bias.any() for layer in layers)
    weight = layers[2].weight.detach()
    torch.testing.assert_close(weight @ weight.t(), 0.01**2 * torch.eye(4), rtol=1e-4, atol=1e-9)
    assert model.critics.layers.weight_0.shape == (2, 5, 4)
    assert not model.critics.layers.bias_0.any()
    assert model.policy.net.layers.nonlinearity == "tanh"


def test_distributions_are_honoured():
    """An override for Box replaces the squashed Gaussian, one for a part that of the part."""
    beta = build(distributions={"Box": "beta"})
    assert isinstance(beta.distribution, Beta)
    node = {"name": "squashed_gaussian", "state_dependent_std": False, "initial_log_std": -0.5}
    free = build(distributions={"Box": node})
    assert torch.equal(results(free, "box")[0][:, 2:], torch.full((N, 2), -0.5))
    assert free.policy.free_params.requires_grad
    mixed = build("parts", distributions={"turn": "diagonal_gaussian"})
    kinds = dict(zip(mixed.actions.part_keys, mixed.actions.parts, strict=True))
    assert type(kinds["aim"]) is SquashedGaussian
    assert type(kinds["turn"]) is DiagonalGaussian


@pytest.mark.parametrize("encoder", ["nature", "flat"])
def test_images(encoder):
    """Policy and critics read images each with their own convolutions, critics with one."""
    model = build_soft_actor_critic(ModelConfig(image_encoder=encoder), *PROBLEMS["image"], 0)
    layers = list(model.policy.net.layers.layers)
    sizes = [512, 4] if encoder == "nature" else [256, 256, 4]
    assert [layer.out_features for layer in layers] == sizes
    found = [isinstance(m, ImageEncoder) for m in model.modules()]
    assert sum(found) == (3 if encoder == "nature" else 0), "policy, critics, targets"
    assert model.critics.layers.weight_0.shape[0] == 2
    assert model.critics.layers.weight_0.shape[2] == sizes[0]
    owners = [{id(p) for p in m.parameters()} for m in (model.policy, model.critics)]
    assert not owners[0] & owners[1]
    assert [r.shape[-1] for r in results(model, "image")] == [4, 1, 1]


def test_dict_observations_and_actions():
    """Critics read the continuous parts, and give one value for each choice."""
    model = build("parts")
    assert isinstance(model.critics.encoder, DictEncoder)
    assert model.critics.encoder.keys == ["at", "gear"]
    assert model.actions.critic_input_size == 3
    params, q, target_q = results(model, "parts")
    assert params.shape == (N, 2 * 2 + 2 + 5 + 2 * 1)
    assert q.shape == target_q.shape == (2, N, 2 + 5)
    assert model.log_temperatures.shape == (4,)
    assert not model.log_temperatures.any()


def test_temperatures_go_to_their_parts():
    """`entropy_terms` gives each continuous part, and each choice of a discrete one, its own."""
    model = build("parts")
    assert model.actions.part_keys == ["aim", "fire", "menu", "turn"]
    sample = SoftSample(*(torch.rand(N, size) for size in (3, 2, 7, 7)))
    terms = model.entropy_terms(sample, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert terms.temperatures.tolist() == [1.0, 4.0]
    assert terms.choice_temperatures.tolist() == [2.0] * 2 + [3.0] * 5
    assert terms.log_probs is sample.log_probs
    assert terms.choice_probs is sample.probs
    assert terms.choice_log_probs is sample.choice_log_probs
    empty = torch.rand(N, 0)
    alone = build("box").entropy_terms(
        SoftSample(torch.rand(N, 2), torch.rand(N, 1), empty, empty), torch.tensor([5.0])
    )
    assert (alone.choice_probs, alone.choice_temperatures) == (None, None)
    assert alone.temperatures.tolist() == [5.0]


def test_masks():
    """Illegal actions have probability 0; networks do not read the mask."""
    model = build("masked")
    obs = observations("masked")
    assert list(model.inputs(obs)) == ["at"]
    assert model.critics.encoder.keys == ["at"]
    probs = model.policy_params(obs).softmax(-1)
    assert not probs[:, [1, 3]].any()
    assert probs[:, [0, 2]].all()
    free = dict(obs, action_mask=torch.ones(N, 4))
    torch.testing.assert_close(
        model.policy_params(obs)[:, [0, 2]], model.policy_params(free)[:, [0, 2]]
    )


def test_normalisation():
    """What networks read is normalised where the configuration says so."""
    config = ObservationNormalizationConfig(mode="running")
    model = build("masked", normalization=config)
    obs = observations("masked")
    model.normalizer.update({"at": 100.0 + obs["at"]})
    inputs = model.inputs({**obs, "at": 100.0 + obs["at"]})
    assert list(inputs) == ["at"]
    assert float(inputs["at"].mean().abs()) < 1e-3
    assert float(inputs["at"].std()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("num_critics", [1, 2, 5])
@pytest.mark.parametrize("critic", [None, "OwnCritic"])
def test_any_number_of_critics(num_critics, critic):
    """Each with its own weights, and all of them in the targets."""
    model = build(num_critics=num_critics, critic=critic and own(critic))
    assert isinstance(model.critics, OwnCritics if critic else TemplateCritics)
    _, q, target_q = results(model, "box")
    assert q.shape == (num_critics, N, 1)
    assert torch.equal(q, target_q)
    assert len(torch.unique(q[:, 0])) == num_critics
