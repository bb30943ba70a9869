"""Codes of step ends from flags."""

from __future__ import annotations

from dataclasses import replace

import torch

from maze_train.core.step_end import StepEnd


def ends_of(terminated, truncated=None, gaps=None, gap=StepEnd.DROPPED):
    """Return the codes of flags `[T, B]`; rows in `gaps` are not transitions; terminated wins."""
    end = torch.as_tensor(terminated).byte()
    if truncated is not None:
        end[torch.as_tensor(truncated).bool() & (end == 0)] = StepEnd.TRUNCATED
    if gaps is not None:
        end[torch.as_tensor(gaps)] = gap
    return end


def with_gaps(rollout, gaps, gap=StepEnd.DROPPED):
    """Return the rollout with additional rows that are not transitions."""
    end = rollout.end.masked_fill(gaps, gap)
    return replace(rollout, end=end, has_gaps=None)
