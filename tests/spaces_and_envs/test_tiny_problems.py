"""PPO, and partly ES and BC, reach the optimum for every kind of space."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import everyday
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from own_callbacks import StopAtReturn
from recorded import record
from tiny_problems import ORDERS, QUESTIONS, QUIET, STEPS, Order, Recall, learn

from maze_train import ModelConfig, build_actor_critic, train
from maze_train.distributions.mapping import DEFAULTS
from maze_train.spaces.describe import flat_spaces

PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 64, "batch_size": 128}
PPO["n_optimization_epochs"] = 5
ES: dict[str, Any] = {"name": "es", "lr": "linear_0.1", "noise_stddev": 0.2}

TOLERANCE = 0.3
"""Tolerance of the return for continuous actions: 0.1 per entry and step."""

PAGE = Path(__file__).parents[2] / "docs" / "spaces.md"


def best_return(
    tmp_path: Path, env: Any, algorithm: dict[str, Any], steps: int, enough: float, **keys: Any
) -> Any:
    """Return the best mean return of 60 greedy episodes."""
    algorithm = {"lr": "linear_0.002", **algorithm}
    return learn(tmp_path, env, algorithm, steps, 60, enough, **keys).best_metric


def ordered(space: spaces.Space[Any], wanted: Any) -> Any:
    """Return a target value as an action of its space."""
    if isinstance(space, spaces.Dict):
        return {key: ordered(part, wanted[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(ordered(*pair) for pair in zip(space.spaces, wanted, strict=True))
    return np.asarray(wanted, space.dtype).reshape(space.shape)


@pytest.mark.parametrize("make", [*QUESTIONS.values(), *ORDERS.values(), Recall])
@pytest.mark.filterwarnings("ignore:.*infinity")
@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space")
def test_tiny_problem_optimum_is_correct(make: Any) -> None:
    """The correct answer gives the best return in every episode; gymnasium's checker passes."""
    env = make()
    check_env(env, skip_render_check=True)
    best = 1 if isinstance(env, Recall) else STEPS
    for seed in range(20):
        env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(right_action(env))
            total += reward
            ended = terminated or truncated
        assert total == pytest.approx(best, abs=1e-6)


def right_action(env: Any) -> Any:
    """Return the action with the highest reward."""
    if isinstance(env, Order):
        return ordered(env.action_space, env.wanted[env.order])

    return env.signal if isinstance(env, Recall) else env.answer


OFTEN = "Box", "image, channels last", "nested Dict", "MultiDiscrete", "Box, bounds per entry"


OTHERS = {
    "es": ("nested Dict", "MultiDiscrete", "Dict"),
    "bc-nll": ("image, channels last", "MultiDiscrete", "Tuple"),
    "bc-mse": ("Dict",),
}
"""Kinds of spaces that other algorithms are tested on."""


def problems(makers: dict[str, Any]) -> list[Any]:
    """Return cases: every kind with PPO, and some kinds with other algorithms."""
    cases = [(kind, "ppo") for kind in makers]
    cases += [(kind, name) for name, kinds in OTHERS.items() for kind in kinds if kind in makers]
    exact = [kind for kind, make in makers.items() if is_exact(make().action_space)]
    cases = [case for case in cases if case[1] != "bc-mse" or case[0] not in exact]
    often = [(kind, "ppo") for kind in makers if kind in OFTEN]
    often += [
        case for case in cases if case in (("MultiDiscrete", "es"), ("MultiDiscrete", "bc-nll"))
    ]
    return everyday(len(often), often + [case for case in cases if case not in often])


def is_exact(space: spaces.Space[Any]) -> bool:
    """Return whether all actions are integers."""
    return all(
        not isinstance(leaf, spaces.Box) or leaf.dtype.kind in "iu"
        for leaf in flat_spaces(space).values()
    )


def cloned_return(tmp_path: Path, make: Any, box_loss: str, enough: float) -> float:
    """Return the best return of a policy cloned from the correct actions."""
    env = make()
    record(tmp_path / "data", env, lambda _: right_action(env), 200)
    algorithm = {"name": "bc", "n_epochs": 24, "batch_size": 32, "lr": 0.003, "box_loss": box_loss}
    result = train(
        env=make,
        algorithm=algorithm,
        runner={"dataset": str(tmp_path / "data")},
        model={"hidden_sizes": [32]},
        evaluation={"n_episodes": 40, "interval": 12},
        tracking=QUIET,
        callbacks=[StopAtReturn(enough)],
        seed=1,
        run_dir=str(tmp_path / "run"),
    )
    return float(result.best_metric)


def found_return(tmp_path: Path, make: Any, algorithm: str, steps: int, enough: float) -> float:
    """Return the best return of PPO, of ES with a small network, or of a clone."""
    if algorithm.startswith("bc"):
        return cloned_return(tmp_path, make, algorithm[3:], enough)
    if algorithm == "es":
        return best_return(tmp_path, make, ES, 24_000, enough, model={"hidden_sizes": [16]})
    return best_return(tmp_path, make, PPO, steps, enough)


@pytest.mark.learning
@pytest.mark.parametrize("problem", problems(QUESTIONS), ids="-".join)
def test_ppo_solves_every_kind_of_observation(tmp_path: Path, problem: tuple[str, str]) -> None:
    """All questions are answered correctly."""
    kind, algorithm = problem
    assert found_return(tmp_path, QUESTIONS[kind], algorithm, 10_000, STEPS) >= STEPS


@pytest.mark.learning
@pytest.mark.parametrize("problem", problems(ORDERS), ids="-".join)
def test_ppo_solves_every_kind_of_action(tmp_path: Path, problem: tuple[str, str]) -> None:
    """Discrete targets are matched exactly, continuous ones within 0.1."""
    kind, algorithm = problem
    exact = is_exact(ORDERS[kind]().action_space)
    steps, enough = (10_000, STEPS) if exact else (30_000, STEPS - TOLERANCE)
    assert found_return(tmp_path, ORDERS[kind], algorithm, steps, enough) >= enough


@pytest.mark.learning
@pytest.mark.parametrize("family", everyday(1, ["squashed_gaussian", "beta"]))
def test_distributions_for_bounded_boxes_reach_the_optimum(tmp_path: Path, family: str) -> None:
    """Other distributions for bounded boxes reach the same actions."""
    model = {"distributions": {"Box": family}}
    # Otherwise the state-dependent std of a squashed Gaussian decreases too fast.
    algorithm = {**PPO, "entropy_coef": 0.1}
    enough = STEPS - TOLERANCE
    best = best_return(tmp_path, ORDERS["Box"], algorithm, 30_000, enough, model=model)
    assert best >= enough


# -- the page ------------------------------------------------------------------------------------


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of docs/spaces.md."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def space_in(cell: str) -> Any:
    """Return the space in a cell of the table."""
    names = {name: getattr(spaces, name) for name in spaces.__all__}
    names |= {"inf": np.inf, "array": lambda values: np.array(values, np.float32)}
    names |= {name: getattr(np, name) for name in ("float32", "float64", "uint8", "int32")}
    return eval(cell.strip("`"), names)


@pytest.mark.parametrize(
    ("heading", "problems"),
    [("Observations", QUESTIONS), ("Actions", ORDERS)],
    ids=["Observations", "Actions"],
)
def test_spaces_page_lists_the_tested_problems(heading: str, problems: dict[str, Any]) -> None:
    """Kinds, spaces, and default encoders or distributions match the problems above."""
    rows = rows_of(heading)
    assert [row[0] for row in rows] == list(problems)
    for kind, space, means, algorithms in rows:
        env = problems[kind]()
        model = build_actor_critic(ModelConfig(), env.observation_space, env.action_space, 0)
        tested = [name for name, kinds in OTHERS.items() if kind in kinds]
        tested = sorted({name.partition("-")[0] for name in tested} - {"bc"} | {"ppo"})
        assert re.findall("`(.+?)`", algorithms) == tested
        if heading == "Observations":
            net: Any = model.trunk or model.policy.net
            assert space_in(space) == env.observation_space
            assert re.findall("`(.+?)`", means) == [type(net.encoder).__name__]
        else:
            assert space_in(space) == env.action_space
            leaves = flat_spaces(env.action_space).values()
            assert re.findall("`(.+?)`", means) == [
                DEFAULTS[type(leaf).__name__] for leaf in leaves
            ]
