"""Names of settings in other libraries, with which messages suggest ours."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from maze_train.core.plain_yaml import load_yaml


@cache
def other_names() -> dict[str, str]:
    """Return the words of other libraries, divided by blanks, by our setting."""
    text = files(__package__).joinpath("other_names.yaml").read_text(encoding="utf-8")
    names: dict[str, str] = load_yaml(text)
    return names


def ours_for(word: str) -> list[str]:
    """Return our settings for a word of another library; hyphens and capitals do not matter."""
    word = word.lower().replace("-", "_")
    return [ours for ours, words in other_names().items() if word in words.split()]
