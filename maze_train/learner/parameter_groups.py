"""Parameters of one optimizer, in groups that have a learning rate or are frozen together."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from maze_train.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from maze_train.learner.config import Freeze, GradientSettings


def matches(pattern: str, name: str) -> bool:
    """Whether a parameter is meant by its own name, by that of a part, or by a pattern of it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def frozen_parameters(
    rules: Iterable[Freeze], updates: int, modules: Mapping[str, nn.Module]
) -> list[nn.Parameter]:
    """The parameters that some rule freezes in the update after `updates` others."""
    patterns = [pattern for rule in rules if rule.holds(updates) for pattern in rule.params]
    return [
        param
        for module in modules.values()
        for name, param in module.named_parameters()
        if any(matches(pattern, name) for pattern in patterns)
    ]


def grouped(
    params: Sequence[nn.Parameter], module: nn.Module, settings: GradientSettings
) -> list[tuple[float, list[nn.Parameter]]]:
    """Parameters of a module in groups, each with its factor of the learning rate.

    Parameters have a group in common if they have the factor of the learning rate in common, and
    are named by the same entries of `freeze`.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    groups: dict[tuple[float, tuple[int, ...]], list[nn.Parameter]] = {}
    for param in params:
        name = names.get(id(param), "")
        factors = (factor for key, factor in settings.lr_factors.items() if matches(key, name))
        factor = next(factors, 1.0)
        frozen_by = tuple(
            i
            for i, rule in enumerate(settings.freeze)
            if any(matches(pattern, name) for pattern in rule.params)
        )
        groups.setdefault((factor, frozen_by), []).append(param)
    return [(factor, members) for (factor, _), members in groups.items()]


def check_names(settings: GradientSettings, modules: Mapping[str, nn.Module]) -> None:
    """Refuse names in settings that mean no parameter of any module.

    Raises:
        ConfigError: If there is one, with close names.
    """
    known = [name for module in modules.values() for name, _ in module.named_parameters()]
    for key, pattern in _patterns(settings):
        if not any(matches(pattern, name) for name in known):
            parts = dict.fromkeys(part for name in known for part in _with_owners(name))
            close = ", ".join(nearest(pattern, list(parts), count=3))
            raise ConfigError(
                key,
                f"no parameter has this name; close ones: {close or ', '.join(list(parts)[:5])}",
                pattern,
            )


def _patterns(settings: GradientSettings) -> Iterator[tuple[str, str]]:
    for pattern in settings.lr_factors:
        yield "algorithm.lr_factors", pattern
    for i, rule in enumerate(settings.freeze):
        for pattern in rule.params:
            yield f"algorithm.freeze[{i}].params", pattern


def _with_owners(name: str) -> Iterator[str]:
    """A parameter's name after those of the parts that hold it: `a`, `a.b`, `a.b.weight`."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])
