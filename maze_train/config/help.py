"""Text of `maze-run --help`. Hydra, gymnasium and torch are not imported, for speed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.resources import files

from maze_train.config.options import describe_options, group_names, list_options


def help_text(folders: Sequence[str] = ()) -> str:
    """Return the text of `maze-run --help`: groups with their options, common keys, examples.

    Args:
        folders: The user's configuration folders; their options are included.
    """
    text = files(__package__).joinpath("help.txt").read_text(encoding="utf-8")
    return text.replace("{choices}\n", _groups(folders)).rstrip()


def _groups(folders: Sequence[str]) -> str:
    lines = ["Choices"]
    for name, text in describe_options("algorithm", folders).items():
        head = f"  {f'algorithm={name}':<28} "
        lines += textwrap.wrap(head + text, 96, subsequent_indent=" " * len(head))
    lines.append(f"  {'env=<id>':<28} any registered gymnasium id, such as CartPole-v1")
    for group in group_names():
        shipped = {"default", *(list_options("env") if group == "env" else ())}
        options = [name for name in list_options(group, folders) if name not in shipped]
        if group != "algorithm" and options:
            # Spaces allow line breaks and are removed below.
            text = f"{group}={'| '.join(options)}"
            wrapped = textwrap.wrap(
                text, 96, initial_indent="  ", subsequent_indent="    ", break_long_words=False
            )
            lines += [line.replace("| ", "|") for line in wrapped]
    return "\n".join(lines) + "\n"
