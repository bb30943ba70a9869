"""Files of policies: what writes them, and what runs them."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from maze_train.errors import ExportError
from maze_train.extras import import_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maze_train.export.step import PolicyStep
    from maze_train.types import Array, Tensor


Inputs: TypeAlias = "dict[str, Tensor]"
Function: TypeAlias = "Callable[[Inputs], dict[str, Array]]"

DESCRIPTION = "maze_train.json"
"""Name of the description: of an entry of ONNX's metadata, else of a file in the archive."""

PURPOSE = "format=onnx"


class Format(NamedTuple):
    """A kind of file."""

    suffix: str
    """End of its name."""

    write: Callable[[PolicyStep, Inputs, str], bytes]
    """Gives the content for a policy, examples of its inputs, and a description in JSON."""

    load: Callable[[bytes], Function]
    """Gives a function that runs the content."""


def write_onnx(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """The policy as ONNX.

    Raises:
        ExportError: If it can not be recorded.
        MissingExtraError: If a package is missing.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "onnx", PURPOSE)
    program = recorded(step, inputs)
    with torch.no_grad():
        outputs = list(step(inputs))
    with quiet("ONNX can not hold the policy"):
        program = program.run_decompositions({torch.ops.aten.softplus.default: _softplus})
        found: Any = torch.onnx.export(
            program,
            dynamic_shapes=any_number(inputs),
            input_names=list(inputs),
            output_names=outputs,
            dynamo=True,
            verbose=False,
        )
        found.model.metadata_props[DESCRIPTION] = description
        content: bytes = found.model_proto.SerializeToString()
    return content


def load_onnx(content: bytes) -> Function:
    """A function that runs the policy with onnxruntime."""
    runtime = import_extra("onnxruntime", "onnx", PURPOSE)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Inputs) -> dict[str, Array]:
        arrays = {key: value.numpy() for key, value in inputs.items()}
        return dict(zip(names, session.run(names, arrays), strict=True))

    return run


def write_torch_export(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """The policy as an archive of `torch.export`."""
    buffer, program = io.BytesIO(), recorded(step, inputs)
    with quiet("PyTorch can not write the policy"):
        torch.export.save(program, buffer, extra_files={DESCRIPTION: description})
    return buffer.getvalue()


def load_torch_export(content: bytes) -> Function:
    """A function that runs the policy with PyTorch."""
    return arrays_of(torch.export.load(io.BytesIO(content)).module())


def write_torchscript(step: PolicyStep, inputs: Inputs, description: str) -> bytes:
    """The policy as TorchScript, which PyTorch discourages since version 2.13."""
    buffer = io.BytesIO()
    with quiet("PyTorch can not record the policy"), torch.no_grad():
        module = torch.jit.trace(step, (inputs,), strict=False, check_trace=False)  # type: ignore[no-untyped-call]  # untyped in torch
        torch.jit.save(module, buffer, _extra_files={DESCRIPTION: description})
    return buffer.getvalue()


def load_torchscript(content: bytes) -> Function:
    """A function that runs the policy with PyTorch."""
    with quiet("PyTorch can not read what it wrote"):
        return arrays_of(torch.jit.load(io.BytesIO(content)))  # type: ignore[no-untyped-call]  # untyped in torch


def arrays_of(module: Any) -> Function:
    """A module on tensors by name as a function that returns arrays."""

    def run(inputs: Inputs) -> dict[str, Array]:
        with torch.no_grad():
            return {name: output.numpy() for name, output in module(inputs).items()}

    return run


def recorded(step: PolicyStep, inputs: Inputs) -> Any:
    """The operations of a policy for any number of environments, an `ExportedProgram`."""
    with quiet("PyTorch can not record the policy"), torch.no_grad():
        return torch.export.export(step, (inputs,), dynamic_shapes=any_number(inputs), strict=False)


def any_number(inputs: Inputs) -> Any:
    """The first dimension of all inputs, which may be any number n."""
    n = torch.export.Dim("n")
    return ({name: {0: n} for name in inputs},)


@contextmanager
def quiet(problem: str) -> Iterator[None]:
    """What PyTorch warns of and logs does not concern users; what it raises becomes one error.

    Raises:
        ExportError: If something is raised.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = f"{problem}: {type(error).__name__}: {lines[0]}"
        remedy = "networks of your own may not choose what they compute by values of tensors"
        raise ExportError(f"{found}; {remedy}, or try another format") from error
    finally:
        logging.disable(before)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """The function log(1 + exp(β x)) / β: onnxruntime has none for float64."""
    scaled = x * beta
    return (scaled.clamp(min=0.0) + (-scaled.abs()).exp().log1p()) / beta


FORMATS = {
    "onnx": Format(".onnx", write_onnx, load_onnx),
    "torchscript": Format(".ts", write_torchscript, load_torchscript),
    "torch_export": Format(".pt2", write_torch_export, load_torch_export),
}
