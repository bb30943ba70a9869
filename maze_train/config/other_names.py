"""Names of settings in other libraries, used to suggest the equivalent setting."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from maze_train.core.plain_yaml import load_yaml


@cache
def other_names() -> dict[str, str]:
    """Return the names in other libraries, separated by spaces, for each setting."""
    text = files(__package__).joinpath("other_names.yaml").read_text(encoding="utf-8")
    names: dict[str, str] = load_yaml(text)
    return names


def ours_for(word: str) -> list[str]:
    """Return the settings equivalent to a name in another library, ignoring case and hyphens."""
    word = word.lower().replace("-", "_")
    return [ours for ours, words in other_names().items() if word in words.split()]
