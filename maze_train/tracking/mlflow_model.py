"""Policies as MLflow models."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from gymnasium.spaces import Space

from maze_train.core.files import read_json
from maze_train.core.names import SPACES
from maze_train.spaces.describe import flat_spaces, space_from_dict

MODEL, CODE = "model", "policy_model.py"
MODEL_CODE = """\
from maze_train import load_policy
from maze_train.spaces.describe import flatten_value, unflatten_value
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class Policy(PythonModel):
    def load_context(self, context):
        self.policy = load_policy(context.artifacts["policy"])

    def predict(self, context, model_input, params=None):
        observation = unflatten_value(self.policy.observation_space, model_input)
        actions = self.policy.predict(observation, deterministic=True)[0]
        return flatten_value(self.policy.action_space, actions)


set_model(Policy())
"""
"""Code that MLflow executes to load a model."""


def save_model(policy: Path, folder: Path) -> None:
    """Write a saved policy as an MLflow model with its signature, in the subfolder `MODEL`."""
    pyfunc = importlib.import_module("mlflow.pyfunc")
    (folder / CODE).write_text(MODEL_CODE, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow recommends type hints and examples.
        pyfunc.save_model(
            str(folder / MODEL),
            python_model=str(folder / CODE),
            artifacts={"policy": str(policy)},
            signature=_signature(policy),
            pip_requirements=["maze_train"],
        )


def _signature(policy: Path) -> object:
    """Return the signature: batches of observations as inputs, batches of actions as outputs.

    Leaves of Dict and Tuple spaces have flattened names, such as `camera/pixels`.
    """
    found, models = read_json(policy / SPACES), importlib.import_module("mlflow.models")
    inputs = _schema(space_from_dict(found["observation_space"]))
    return models.ModelSignature(inputs, _schema(space_from_dict(found["action_space"])))


def _schema(space: Space[Any]) -> object:
    types = importlib.import_module("mlflow.types.schema")
    return types.Schema(
        [
            types.TensorSpec(leaf.dtype, (-1, *(leaf.shape or ())), key or None)
            for key, leaf in flat_spaces(space).items()
        ]
    )
