"""The dump: token ids and the log-probability that its maker gave to each, in one safetensors file.

    ids           I64 [T]        token ids, sequence after sequence
    logprob       F32 [T - B]    natural log-probability of every token but the first of each of the B sequences
    cu_seqlens    I64 [B + 1]    where sequences begin, and T; in layout "packed" alone
    prompt_lens   I64 [B]        how many tokens of each sequence were given and not drawn (optional)
    seeds         U64 [B]        of the draws of each reply (with prompt_lens, where the maker drew them)
    first_logits  F32 [V]        logits behind the very first token (optional)

    layout        "single" (B is 1) or "packed"
    commit        what made it: a revision of the trainer's code
    generator     name and version of the program (optional, as are all below)
    artifact      digest of the artifact that it is for
    weights       version of the weights
    temperature   of the draws; with it the replies are those that the engine draws from prompt and seed

docs/align.md says the same at length. Numbers are little-endian, and no value of ``logprob`` is a NaN.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenspeed.errors import DumpError, ResourceError
from tokenspeed.runtime.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from tokenspeed.tensor_file import Tensor, TensorIndex, read_index, read_tensor, write

LAYOUTS = ("single", "packed")
_TENSORS: Mapping[str, tuple[str, str]] = {
    "ids": ("I64", "q"),
    "logprob": ("F32", "f"),
    "cu_seqlens": ("I64", "q"),
    "prompt_lens": ("I64", "q"),
    "seeds": ("U64", "Q"),
    "first_logits": ("F32", "f"),
}
"""Type in the file and in memory, of every tensor that a dump may have."""
_NEEDED = ("ids", "logprob")
_TEXTS = ("commit", "generator", "artifact", "weights")


@dataclass(frozen=True)
class Sequence:
    """One sequence: ``logprob[i]`` is that of ``ids[i + 1]``. ``prompt_len`` None: its maker does not say."""

    ids: list[int]
    logprob: list[float]
    prompt_len: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Dump:
    """A dump in memory. ``temperature`` None: replies, if any, were drawn by no rule that can be repeated."""

    sequences: tuple[Sequence, ...]
    commit: str
    generator: str = ""
    artifact: str = ""
    weights: str = ""
    temperature: float | None = None
    first_logits: list[float] | None = None


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """The dump at ``path``. Raises DumpError, naming what is wrong with it."""
    try:
        return _read(path)
    except OSError as e:
        raise DumpError(f"cannot read the dump {os.fspath(path)}: {e.strerror}") from None
    except ValueError as e:
        raise DumpError(
            f"the dump {os.fspath(path)} is damaged, or none: {e}", hint="docs/align.md has the format"
        ) from None


def write_dump(path: str | os.PathLike[str], dump: Dump) -> None:
    """Write ``dump``; there is a whole file or none. Raises ResourceError."""
    packed = len(dump.sequences) != 1
    arrays: dict[str, array[Any]] = {
        "ids": array("q", [token for s in dump.sequences for token in s.ids]),
        "logprob": array("f", [value for s in dump.sequences for value in s.logprob]),
    }
    if packed:
        arrays["cu_seqlens"] = array("q", _ends(dump))
    if all(s.prompt_len is not None for s in dump.sequences):
        arrays["prompt_lens"] = array("q", [s.prompt_len or 0 for s in dump.sequences])
    if all(s.seed is not None for s in dump.sequences):
        arrays["seeds"] = array("Q", [s.seed or 0 for s in dump.sequences])
    if dump.first_logits is not None:
        arrays["first_logits"] = array("f", dump.first_logits)
    metadata = {"layout": "packed" if packed else "single", "commit": dump.commit}
    metadata |= {name: value for name in _TEXTS[1:] if (value := getattr(dump, name))}
    if dump.temperature is not None:
        metadata["temperature"] = repr(dump.temperature)
    tensors = {name: Tensor(_TENSORS[name][0], (len(a),), _bytes(a)) for name, a in arrays.items()}
    try:
        write(path, tensors, metadata)
    except OSError as e:
        raise ResourceError(f"cannot write the dump {os.fspath(path)}: {e.strerror}") from None


def _ends(dump: Dump) -> Iterator[int]:
    end = 0
    yield end
    for sequence in dump.sequences:
        end += len(sequence.ids)
        yield end


def _read(path: str | os.PathLike[str]) -> Dump:
    index = read_index(path)
    for name in _NEEDED:
        if name not in index.entries:
            raise ValueError(f"it has no tensor {name!r}")
    for name, entry in index.entries.items():
        if name not in _TENSORS:
            raise ValueError(f"it has a tensor {name[:40]!r}, which no dump has")
        if entry.dtype != _TENSORS[name][0] or len(entry.shape) != 1:
            raise ValueError(
                f"{name} must be {_TENSORS[name][0]} of one dimension, not {entry.dtype} {list(entry.shape)}"
            )
    in_order = sorted(index.entries.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    for (name, entry), (following, other) in pairwise(in_order):
        if other.offset < entry.offset + entry.nbytes:
            raise ValueError(f"its tensors {name} and {following} overlap")
    arrays = {name: _array(_TENSORS[name][1], read_tensor(path, index, name)) for name in index.entries}
    for name in ("logprob", "first_logits"):
        if any(map(math.isnan, arrays.get(name, ()))):
            raise ValueError(f"{name} has a NaN")
    metadata = index.metadata
    if "commit" not in metadata:
        raise ValueError("its metadata lack 'commit': which revision of the trainer made it")
    first_logits, temperature = arrays.get("first_logits"), _temperature(metadata.get("temperature"))
    if temperature and "prompt_lens" in arrays and "seeds" not in arrays:
        raise ValueError(f"its replies were drawn at temperature {temperature:g}, and it has no tensor 'seeds'")
    return Dump(
        sequences=tuple(_sequences(arrays, _bounds(arrays, index))),
        **{name: metadata.get(name, "") for name in _TEXTS},
        temperature=temperature,
        first_logits=None if first_logits is None else first_logits.tolist(),
    )


def _bounds(arrays: Mapping[str, array[Any]], index: TensorIndex) -> list[int]:
    """Where sequences begin and end, from layout and cu_seqlens."""
    layout, total = index.metadata.get("layout"), len(arrays["ids"])
    if layout not in LAYOUTS:
        raise ValueError(f"its layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if ("cu_seqlens" in arrays) != (layout == "packed"):
        raise ValueError(
            f"its layout is {layout!r}, and it has {'a' if layout == 'single' else 'no'} tensor 'cu_seqlens'"
        )
    if not total:
        raise ValueError("it has no token")
    bounds = arrays["cu_seqlens"].tolist() if layout == "packed" else [0, total]
    grows = all(a < b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or not grows:
        raise ValueError(f"cu_seqlens must rise from 0 to {total}, the number of ids, by 1 or more each")
    number = len(bounds) - 1
    if len(arrays["logprob"]) != total - number:
        raise ValueError(
            f"{total} ids of {number} sequence{'s' if number > 1 else ''} need {total - number} log-probabilities, and"
            f" there are {len(arrays['logprob'])}"
        )
    for name in ("prompt_lens", "seeds"):
        if name in arrays and len(arrays[name]) != number:
            raise ValueError(f"{name} must have one entry for each of {number} sequences, not {len(arrays[name])}")
    return bounds


def _sequences(arrays: Mapping[str, array[Any]], bounds: list[int]) -> Iterator[Sequence]:
    prompt_lens, seeds = arrays.get("prompt_lens"), arrays.get("seeds")
    for number, (begin, end) in enumerate(pairwise(bounds)):
        prompt_len = None if prompt_lens is None else prompt_lens[number]
        if prompt_len is not None and not 1 <= prompt_len <= end - begin:
            raise ValueError(f"sequence {number} has {end - begin} tokens, and a prompt of {prompt_len}")
        yield Sequence(
            ids=arrays["ids"][begin:end].tolist(),
            logprob=arrays["logprob"][begin - number : end - number - 1].tolist(),
            prompt_len=prompt_len,
            seed=None if seeds is None else seeds[number],
        )


def _temperature(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(f"its temperature is {text[:40]!r}, which is none")
    return value


def _array(typecode: str, data: bytes) -> array[Any]:
    values = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()
