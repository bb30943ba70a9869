"""The configuration of an export: a policy, and the file that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from maze_train.checks import absolute_path
from maze_train.config.loading import build_config, values_by_field
from maze_train.conversion import convert_fields
from maze_train.errors import ConfigError
from maze_train.hub import is_on_hub

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(kw_only=True)
class ExportConfig:
    """Everything that defines an export."""

    run: str = ""
    """Directory of a training run, whose best policy is exported, of one of its saved policies, or
    `<run>@final`, `<run>@epoch_<n>`."""

    format: Literal["onnx", "torchscript", "torch_export"] = "onnx"
    """Kind of file: ONNX (extra `onnx`); TorchScript, which PyTorch discourages; an archive of
    `torch.export`."""

    output: str | None = None
    """The file; null: policy.onnx, policy.ts or policy.pt2 in the run directory; with `agent`
    policy_<agent>.onnx and so on. One that is there is replaced."""

    agent: str | None = None
    """Of several agents the one whose policy it is; null: all of them in one file."""

    trust: list[str] = field(default_factory=list)
    """Modules of networks and environments of your own that the configuration of `run` may name:
    their code is run."""

    def __post_init__(self) -> None:
        convert_fields(self)
        if not self.run.strip():
            problem = "expected the directory of a run, such as run=outputs/a"
            raise ConfigError("run", problem, self.run)
        if self.output is not None:
            self.output = absolute_path("output", self.output)
        elif is_on_hub(self.run):
            problem = "expected a file, such as output=policy.onnx: the run is on the hub"
            raise ConfigError("output", problem, self.output)
        self.run = absolute_path("run", self.run)


def load_export_config(node: Mapping[str, Any]) -> ExportConfig:
    """The configuration of an export from plain values.

    Raises:
        ConfigError: If a key is unknown, or a value has a wrong type or is out of range.
    """
    return build_config(ExportConfig, values_by_field(ExportConfig, node))
