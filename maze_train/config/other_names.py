"""Names of settings in other libraries, used to suggest the equivalent setting."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from maze_train.core.plain_yaml import load_yaml


@cache
def other_names() -> dict[str, str]:
    """Return the names in other libraries, separated by spaces, for each setting."""
    text = files(__package__).joinpath("other_names.yaml").read_text(encoding="utf-8")
    names: dict[str, str] = load_yaml(text)
    return names


def ours_for(word: str, cutoff: float = 1.0) -> list[str]:
    """Return the settings equivalent to a name in another library, ignoring case and hyphens.

    Args:
        word: The name.
        cutoff: Minimum similarity of spelling, in (0, 1]; see `difflib.get_close_matches`.
    """
    names = {ours: words.split() for ours, words in other_names().items()}
    known = [name for words in names.values() for name in words]
    close = get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=cutoff)
    return [ours for ours, words in names.items() if set(close) & set(words)]
