"""The model's parameters in the layouts that the artifact's kernels read, packed by torch where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.compile.ops import PANEL, round_up
from tokenspeed.compile.program import Program, Value
from tokenspeed.errors import ProgramError
from tokenspeed.trainer.memory import TORCH_DTYPES, view
from tokenspeed.values import PackedValue


@dataclass(frozen=True)
class Parameters:
    """The tensors of a model by the names of the checkpoint, and what the Program makes of them."""

    program: Program
    tensors: Mapping[str, torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """What projections are computed in."""
        return TORCH_DTYPES[self.program.dtype]

    def parts(self, weight: str) -> tuple[str, ...]:
        """The parameters that a weight is made of, in order; none for one that has no parameters."""
        source = self.program.values[weight].source
        if source is None:
            return (weight,)
        return tuple(name for part in source.inputs for name in self.parts(part))

    def matrix(self, weight: str) -> torch.Tensor:
        """A weight in its logical shape and its own dtype, without gradients."""
        return self._whole(self.program.values[weight])

    def _whole(self, value: Value) -> torch.Tensor:
        dtype, source = TORCH_DTYPES[value.dtype], value.source
        if source is None:
            return self.tensors[value.name].detach().to(dtype)
        made = [self._whole(self.program.values[name]) for name in source.inputs]
        match source.how:
            case "concat":
                return torch.cat(made)
            case "interleave16":
                return interleave(*made)
            case _:
                raise ProgramError(f"weight {value.name!r}: need a source of parameters, have {source.how!r}")


def pack(parameters: Parameters, packed: Sequence[PackedValue], region: torch.Tensor) -> None:
    """Write every packed weight that is made of parameters to its place in ``region`` (uint8)."""
    with torch.no_grad():
        for weight in packed:
            if not parameters.parts(weight.value):
                continue
            place = view(region, weight.tensor.offset, weight.tensor.dtype, weight.tensor.shape)
            write_packed(parameters.matrix(weight.value), weight.layout, place)


def unpack(parameters: Parameters, packed: Sequence[PackedValue], region: torch.Tensor) -> None:
    """The inverse of ``pack``: give the parameters what ``region`` holds, rounded to their dtypes."""
    with torch.no_grad():
        for weight in packed:
            names = parameters.parts(weight.value)
            value = parameters.program.values[weight.value]
            if not names:
                continue
            place = view(region, weight.tensor.offset, weight.tensor.dtype, weight.tensor.shape)
            whole = read_packed(place, weight.layout, [n for n in value.shape if isinstance(n, int)])
            if value.source is not None and value.source.how == "interleave16":
                parts: Sequence[torch.Tensor] = deinterleave(whole, len(parameters.tensors[names[0]]))
            else:
                parts = whole.split([len(parameters.tensors[name]) for name in names])
            for name, part in zip(names, parts, strict=True):
                parameters.tensors[name].copy_(part)


def write_packed(matrix: torch.Tensor, layout: str, place: torch.Tensor) -> None:
    """Write ``matrix`` to ``place`` in ``layout`` (tokenspeed/compile/weights.py), zeros where it pads.

    Raises ProgramError for a layout that is not known here.
    """
    if layout == "rows":
        place.copy_(matrix.view(place.shape))
        return
    if layout != "panel16":
        raise ProgramError(f"need weights in layout rows or panel16, have {layout!r}")
    rows, columns = matrix.shape
    pair = place.shape[3] if place.dim() == 4 else 1
    padded = round_up(rows, PANEL), round_up(columns, pair)
    if padded != (rows, columns):
        matrix = torch.nn.functional.pad(matrix, (0, padded[1] - columns, 0, padded[0] - rows))
    # [panel][row][pair of columns] -> [panel][pair of columns][row]; a pair of bfloat16 moves as one number.
    if pair == 2:
        matrix, place = matrix.contiguous().view(torch.int32), place.view(torch.int32).squeeze(3)
    place.copy_(matrix.view(-1, PANEL, padded[1] // pair).transpose(1, 2))


def read_packed(place: torch.Tensor, layout: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of ``write_packed``: a tensor of ``shape``."""
    if layout == "rows":
        return place.view(tuple(shape))
    rows, columns = shape
    return place.transpose(1, 2).reshape(place.shape[0] * PANEL, -1)[:rows, :columns]


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[F][K] twice -> [2 * F'][K], F' = F padded to whole panels: 16 rows of gate, 16 of up, and so on."""
    features, width = gate.shape
    padding = (0, 0, 0, round_up(features, PANEL) - features)
    if padding[3]:
        gate, up = (torch.nn.functional.pad(part, padding) for part in (gate, up))
    return torch.stack([gate.view(-1, PANEL, width), up.view(-1, PANEL, width)], dim=1).view(-1, width)


def deinterleave(rows: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves that ``interleave`` made [2 * F'][K] of, [F][K] each."""
    panels = rows.view(-1, 2, PANEL, rows.shape[1])
    gate, up = (panels[:, half].reshape(-1, rows.shape[1])[:features] for half in (0, 1))
    return gate, up
