"""Whether a model is the one that an artifact computes: checked once, and the first difference is named.

What the artifact's kernels would pass by (adapters, hooks, parametrizations, dropout) is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed.compile.derive import rope_parameters
from tokenspeed.compile.program import Program
from tokenspeed.errors import UsageError

LM_HEAD = "lm_head.weight"
"""What transformers calls a head of its own."""
DTYPES = (torch.float32, torch.bfloat16)
_MODEL_TYPES = ("llama", "mistral")
"""Of transformers, that compute what a Program of the Llama family does. Others have parameters of the same names and
shapes, and scale, rotate or normalize in ways of their own."""
_ACTIVATIONS = ("silu", "swish")
_FREQUENCY_TOLERANCE = 1e-5
"""Relative: torch computes rotary frequencies in float32, a build in float64."""
_ROTARY = "inv_freq"


def check_model(model: nn.Module, program: Program) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` by the names that ``program`` gives them.

    Raises UsageError naming the first thing in which the two differ.
    """
    for name, module in model.named_modules():
        _check_module(name, module)
    parameters = _check_parameters(model, program)
    config = getattr(model, "config", None)
    if config is None:
        raise UsageError("need a model with a config, as those of transformers have: it says what shapes do not")
    kind = getattr(config, "model_type", None)
    if kind and kind not in _MODEL_TYPES:
        raise UsageError(
            f"the model's config has model_type {kind!r}, which artifacts do not compute: they have"
            f" {' and '.join(_MODEL_TYPES)}"
        )
    for what, have, need in _facts(config, program):
        if have != need:
            raise UsageError(
                f"the model is not what the artifact computes: its config's {what} is {have!r}, the other's {need!r}",
                hint="build the artifact from this model's checkpoint",
            )
    _check_rotary(model, program)
    return parameters


def check_same(model: nn.Module, aligned: Mapping[str, Tensor], device: torch.device) -> None:
    """Refuse a model that was changed since its parameters were ``aligned``: some came, went, or were replaced; or
    something was put into it that the kernels pass by. Its own forward and hooks are not looked at: they run."""
    for name, module in model.named_modules():
        if name:
            _check_module(name, module)
    have = dict(model.named_parameters())
    for name in (*aligned, *have):
        if have.get(name) is not aligned.get(name):
            raise UsageError(
                f"parameter {name} of the model was added, removed or replaced since the model was aligned",
                hint="detach() it, and align it again",
            )
        if have[name].device != device:
            raise UsageError(f"parameter {name} went to {have[name].device}, and the artifact runs on {device}")
        if have[name].dtype not in DTYPES:
            raise UsageError(f"parameter {name} became {have[name].dtype}; it must be float32 or bfloat16")


def check_training(model: nn.Module) -> None:
    """Refuse dropout that would be on now: the artifact has none."""
    if not model.training:
        return
    dropout = float(getattr(getattr(model, "config", None), "attention_dropout", 0.0) or 0.0)
    if dropout > 0:
        raise UsageError(
            f"the model's config has attention_dropout = {dropout}, and the model is in training mode: the artifact's"
            " kernels have no dropout",
            hint="set it to 0, as a policy that is trained on its own rollouts needs it, or call model.eval()",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UsageError(
                f"module {name} drops out with p = {module.p}, and the model is in training mode: the artifact's"
                " kernels have no dropout",
                hint=f"set {name}.p to 0, or call model.eval()",
            )


def _check_module(name: str, module: nn.Module) -> None:
    where = f"module {name or 'of the model'} ({type(module).__name__})"
    if any("lora" in part.lower() for part in (type(module).__name__, *module._modules, *module._parameters)):
        raise UsageError(
            f"{where} is a LoRA adapter: the artifact's kernels know the model's own weights only",
            hint="merge the adapters into the weights, and train those",
        )
    if "parametrizations" in module._modules:
        raise UsageError(
            f"{where} has parametrized weights, which the artifact's kernels would not see",
            hint="remove the parametrizations",
        )
    if "forward" in vars(module):
        raise UsageError(
            f"{where} has had its forward replaced, which the artifact's kernels would pass by",
            hint="undo that; of a model that is aligned already, call detach() first",
        )
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        raise UsageError(f"{where} is a linear layer of its own kind, which the artifact does not compute")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise UsageError(
            f"{where} has hooks: they would not run, as the artifact's kernels compute the model as a whole",
            hint="remove the hooks; sharding and offloading are not supported",
        )


def _check_parameters(model: nn.Module, program: Program) -> dict[str, nn.Parameter]:
    have = dict(model.named_parameters())
    need = {name: program.values[name].shape for name in checkpoint_weights(program)}
    embedding = next(op.operand("table") for op in program.ops if op.kind == "embedding")
    if LM_HEAD not in need and LM_HEAD in have:
        raise UsageError(
            f"the model has {LM_HEAD} of its own; the artifact's head is {embedding}",
            hint="build the artifact from this model's checkpoint, or tie its embeddings",
        )
    if LM_HEAD in need and LM_HEAD not in have:
        raise UsageError(
            f"the model ties its head to {embedding}; the artifact has {LM_HEAD}",
            hint="build the artifact from this model's checkpoint",
        )
    for name, shape in need.items():
        if name not in have:
            raise UsageError(f"the model has no parameter {name}, which the artifact computes with")
        if tuple(have[name].shape) != shape:
            raise UsageError(
                f"parameter {name} is {list(have[name].shape)} in the model and {list(shape)} in the artifact",
                hint="build the artifact from this model's checkpoint",
            )
        if have[name].dtype not in DTYPES:
            raise UsageError(f"parameter {name} is {have[name].dtype}; it must be float32 or bfloat16")
    for name in have:
        if name not in need:
            raise UsageError(f"the model has a parameter {name}, which the artifact does not compute with")
    first = next(iter(need))
    if have[first].device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {have[first].device}; it must be on the CPU or on a GPU")
    for name in need:
        if have[name].device != have[first].device:
            raise UsageError(
                f"parameter {name} is on {have[name].device} and {first} on {have[first].device}: the artifact runs on"
                " one device"
            )
    return {name: have[name] for name in need}


def checkpoint_weights(program: Program) -> tuple[str, ...]:
    """The tensors of a checkpoint that the ops read, whatever they are packed in."""

    def made_of(name: str) -> Iterator[str]:
        source = program.values[name].source
        if source is None:
            yield name
        else:
            for part in source.inputs:
                yield from made_of(part)

    return tuple(dict.fromkeys(part for weight in program.op_weights for part in made_of(weight.name)))


def _facts(config: Any, program: Program) -> Iterator[tuple[str, object, object]]:
    """What a config says, and what the Program says of it."""
    metadata = program.metadata
    heads = config.num_attention_heads
    yield "num_attention_heads", heads, metadata["num_heads"]
    yield "num_key_value_heads", getattr(config, "num_key_value_heads", None) or heads, metadata["num_kv_heads"]
    yield "head_dim", getattr(config, "head_dim", None) or config.hidden_size // heads, metadata["head_dim"]
    yield "num_hidden_layers", config.num_hidden_layers, metadata["num_layers"]
    yield "hidden_act", config.hidden_act if config.hidden_act not in _ACTIVATIONS else "silu", "silu"
    eps = next(op.attrs["eps"] for op in program.ops if op.kind == "rms_norm")
    own = float(config.rms_norm_eps)
    # As kernels have it, in float32: a config that transformers made of a GGUF file says 9.999999747378752e-06.
    yield "rms_norm_eps", eps if _float32(own) == _float32(eps) else own, eps
    window = getattr(config, "sliding_window", None)
    if window and window < program.max_model_len:
        yield "sliding_window", window, f"none up to max_model_len = {program.max_model_len}"


def _float32(value: object) -> float:
    return float(torch.tensor(value, dtype=torch.float32).item())


def _check_rotary(model: nn.Module, program: Program) -> None:
    """Compare the angles that the model rotates by with those of the rope table."""
    frequencies, factor = rope_parameters(program)
    need = torch.tensor(frequencies, dtype=torch.float64)
    found = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == _ROTARY}
    if not found:
        raise UsageError(f"the model has no buffer {_ROTARY}: its rotary embedding is of an unknown kind")
    for name, buffer in found.items():
        have = buffer.detach().double().cpu()
        if buffer.dtype is not torch.float32:
            raise UsageError(
                f"the rotary frequencies of {name} are {buffer.dtype}; they must be float32",
                hint="load the model with dtype=torch.bfloat16 rather than cast it: a cast rounds its buffers too",
            )
        if have.shape != need.shape or not torch.allclose(have, need, rtol=_FREQUENCY_TOLERANCE, atol=0):
            raise UsageError(
                f"the rotary frequencies of {name} are not the artifact's: need {_some(need)}, have {_some(have)}",
                hint="build the artifact from this model's checkpoint",
            )
        module = model.get_submodule(name.rpartition(".")[0])
        scaling = float(getattr(module, "attention_scaling", 1.0))
        if not math.isclose(scaling, factor, rel_tol=_FREQUENCY_TOLERANCE):
            raise UsageError(f"the rotary embedding scales by {scaling} in the model and by {factor} in the artifact")


def _some(frequencies: Tensor) -> str:
    first, last = frequencies.flatten()[0].item(), frequencies.flatten()[-1].item()
    return f"{frequencies.numel()} from {first:.6g} to {last:.6g}"


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """The one device that all parameters are on."""
    return next(iter(parameters.values())).device
