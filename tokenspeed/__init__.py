"""TokenSpeed: an LLM inference engine shaped like a compiler.

``build(checkpoint, out)`` makes an artifact; ``load(artifact)`` returns an Engine; ``AsyncLLM`` streams from
one inside an event loop; ``trainer.align(model, artifact)`` has a PyTorch model compute as that engine does. Names
resolve on first use, so that importing the package costs nothing and the runtime never drags the builder in.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tokenspeed import trainer as trainer
    from tokenspeed.compile.build import build as build
    from tokenspeed.runtime.async_llm import AsyncLLM as AsyncLLM
    from tokenspeed.runtime.engine import Engine as Engine
    from tokenspeed.runtime.engine import load as load
    from tokenspeed.runtime.request import RequestOptions as RequestOptions
    from tokenspeed.runtime.request import SamplingParams as SamplingParams

_HOMES = {
    "build": "tokenspeed.compile.build",
    "load": "tokenspeed.runtime.engine",
    "Engine": "tokenspeed.runtime.engine",
    "AsyncLLM": "tokenspeed.runtime.async_llm",
    "RequestOptions": "tokenspeed.runtime.request",
    "SamplingParams": "tokenspeed.runtime.request",
}
__all__ = ["AsyncLLM", "Engine", "RequestOptions", "SamplingParams", "__version__", "build", "load"]


def __getattr__(name: str) -> Any:
    if name == "trainer":  # a package of its own, which needs PyTorch
        return import_module("tokenspeed.trainer")
    if name == "_native":  # asked for before its file is looked for
        return _native_module()
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def _native_module() -> Any:
    try:
        return import_module("tokenspeed._native")
    except ModuleNotFoundError as e:
        raise ImportError(
            f"tokenspeed needs its native module, and {__path__[0]} has none: these are sources, which Python finds"
            " before an installed package where it runs in their folder; install the package (`pip install .`) and run"
            " elsewhere, or with `python -P`",
            name=e.name,
        ) from None
