"""Traces: one request a line of JSON, as public serving traces are written (docs/simulator.md explains every field).

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49]}

``hash_ids`` name the blocks of the prompt, BLOCK_TOKENS tokens each and the last one maybe fewer. Equal ids are equal
tokens, so two prompts share a prefix as long as their ids agree. A reader holds one line at a time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import IO, Any

from tokenspeed.errors import UsageError

BLOCK_TOKENS = 512
MOST_LINE_BYTES = 16 << 20
MOST_TOKENS = 1 << 24
"""Of one request, prompt and output together: the largest max_model_len."""
MOST_MS = 1e12
"""Some thirty years."""
MOST_ID = (1 << 63) - 1
PRIORITIES = range(10)
MOST_NAME = 256


class TraceError(UsageError):
    """A line of a trace is not a request."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Times in milliseconds, lengths in tokens.

    Attributes:
        timestamp: when it arrives, counted from any origin; lines are in order of it.
        input_length: tokens of the prompt.
        output_length: tokens that it draws.
        hash_ids: ids of the prompt's blocks.
        output_hash_ids: ids of the blocks behind those, which what it draws goes on into. With them a later prompt that
            repeats this answer finds it in the prefix index; without them no prompt ever repeats it.
        priority: its class, 0 (first) to 9.
        tenant: who asks, by any name.
        deadline: after so many ms from its arrival it ends, finished or not; None: never.
        session: the conversation that it belongs to, by any name.
        delay: it arrives no earlier than so many ms after the end of its session's request before it (a tool ran, or
            someone read the answer), and no earlier than at ``timestamp``. None: at ``timestamp``.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    output_hash_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    session: str = ""
    delay: float | None = None


# ---- reading --------------------------------------------------------------------------------------------------


def read_trace(path: str | PathLike[str], block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """The requests of a trace file in order; ``-`` is stdin. Empty lines are passed over, unknown fields too.

    Raises TraceError naming the file and the line, when one is no request or arrives before the line above it;
    OSError when the file cannot be read.
    """
    name = "stdin" if path == "-" else str(path)
    before = -math.inf
    with _binary(path) as file:
        for number in range(1, sys.maxsize):
            line = file.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            try:
                request = parse_line(line, block_tokens, before)
            except ValueError as e:
                hint = getattr(e, "hint", None) or "docs/simulator.md has the fields; each line is one JSON object"
                raise TraceError(f"{name}, line {number}: {e}", hint=hint) from None
            if request is not None:
                before = request.timestamp
                yield request


@contextmanager
def _binary(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    if path == "-":
        if sys.stdin is None:
            raise UsageError("need a trace on stdin, which is closed")
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


class _Refused(ValueError):
    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.hint = hint


def parse_line(line: bytes, block_tokens: int, before: float = -math.inf) -> TraceRequest | None:
    """The request of one line, or None for an empty line. ``before`` is the timestamp of the line above.

    Raises ValueError, with a ``hint`` attribute where one helps.
    """
    if len(line) > MOST_LINE_BYTES:
        raise _Refused(f"need at most {MOST_LINE_BYTES} bytes, have more")
    if not line.strip():
        return None
    try:
        raw = json.loads(line)
    except RecursionError:
        raise _Refused("need one JSON object, have brackets nested too deep") from None
    except UnicodeDecodeError as e:
        raise _Refused(f"need UTF-8, have byte 0x{line[e.start]:02x} at column {e.start + 1}") from None
    except json.JSONDecodeError as e:
        raise _Refused(f"need one JSON object: {e.msg} at column {e.colno}") from None
    except ValueError:
        raise _Refused("need one JSON object, have a number of too many digits") from None
    if not isinstance(raw, dict):
        raise _Refused(f"need a JSON object, have {_shown(raw)}")
    return _request(raw, block_tokens, before)


def _request(raw: dict[str, Any], block_tokens: int, before: float) -> TraceRequest:
    num_input = _count(raw, "input_length")
    num_output = _count(raw, "output_length")
    if num_input + num_output > MOST_TOKENS:
        raise _Refused(f"need at most {MOST_TOKENS} tokens in all, have {num_input + num_output}")
    session = _name(raw, "session" if "session" in raw else "session_id")
    delay = _ms(raw, "delay") if raw.get("delay") is not None else None
    if delay is not None and not session:
        raise _Refused("need a session beside delay, have none")
    follows = delay is not None and "timestamp" not in raw and before > -math.inf
    timestamp = before if follows else _ms(raw, "timestamp")
    if timestamp < before:
        raise _Refused(
            f"need timestamps that never fall, have {_number(timestamp)} after {_number(before)}",
            "sort the lines by timestamp",
        )
    priority = raw.get("priority", 0)
    if type(priority) is not int or priority not in PRIORITIES:
        raise _Refused(
            f"priority: need a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}, have {_shown(priority)}"
        )
    hash_ids = _ids(raw, "hash_ids")
    output_hash_ids = _ids(raw, "output_hash_ids")
    _check_blocks(num_input, num_output, len(hash_ids), len(output_hash_ids), block_tokens)
    return TraceRequest(
        timestamp,
        num_input,
        num_output,
        hash_ids,
        output_hash_ids,
        priority,
        _name(raw, "tenant"),
        _ms(raw, "deadline") if raw.get("deadline") is not None else None,
        session,
        delay,
    )


def _check_blocks(num_input: int, num_output: int, num_ids: int, num_output_ids: int, block_tokens: int) -> None:
    """A prompt names all its blocks, all but a last short one, or none."""
    blocks = -(-num_input // block_tokens)
    if num_ids and not num_input // block_tokens <= num_ids <= blocks:
        raise _Refused(
            f"hash_ids: need {blocks} for {num_input} tokens in blocks of {block_tokens}, have {num_ids}",
            "give the trace's own block size with --block-tokens",
        )
    if num_output_ids:
        if num_ids < blocks:
            raise _Refused(f"output_hash_ids: need {blocks} hash_ids before them, have {num_ids}")
        most = -(-(num_input + num_output) // block_tokens) - blocks
        if num_output_ids > most:
            raise _Refused(f"output_hash_ids: need at most {most}, have {num_output_ids}")


def _count(raw: dict[str, Any], name: str) -> int:
    value = _given(raw, name)
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise _Refused(f"{name}: need a whole number from 1 to {MOST_TOKENS}, have {_shown(value)}")
    return value


def _ms(raw: dict[str, Any], name: str) -> float:
    value = _given(raw, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_MS:
        raise _Refused(f"{name}: need milliseconds from 0 to {MOST_MS:.0e}, have {_shown(value)}")
    return value


def _name(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is None:
        return ""
    if type(value) is int and abs(value) <= MOST_ID:
        return str(value)
    if not isinstance(value, str) or len(value) > MOST_NAME or not value.isprintable():
        raise _Refused(f"{name}: need a printable text of at most {MOST_NAME} characters, have {_shown(value)}")
    return value


def _ids(raw: dict[str, Any], name: str) -> tuple[int, ...]:
    value = raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _Refused(f"{name}: need a list of whole numbers, have {_shown(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item <= MOST_ID:
            raise _Refused(f"{name}: need whole numbers from 0 to 2^63 - 1, have {_shown(item)}")
    return tuple(value)


def _given(raw: dict[str, Any], name: str) -> Any:
    if name not in raw:
        raise _Refused(f"need the field {name}, have {', '.join(map(ascii, list(raw)[:8])) or 'none'}")
    return raw[name]


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of too many digits"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _number(value: float) -> str:
    return f"{value:.15g}"


# ---- writing --------------------------------------------------------------------------------------------------


def format_line(request: TraceRequest) -> str:
    """The request as a line of a trace, without fields that say nothing."""
    data: dict[str, Any] = {
        "timestamp": _plain(request.timestamp),
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.hash_ids,
    }
    if request.output_hash_ids:
        data["output_hash_ids"] = request.output_hash_ids
    if request.priority:
        data["priority"] = request.priority
    for name in ("tenant", "session"):
        if value := getattr(request, name):
            data[name] = value
    for name in ("deadline", "delay"):
        if (ms := getattr(request, name)) is not None:
            data[name] = _plain(ms)
    return json.dumps(data)


def _plain(ms: float) -> float:
    return int(ms) if ms == int(ms) else ms


def write_trace(
    file: IO[str], requests: Iterable[TraceRequest], progress: Callable[[int], None] = lambda _: None
) -> int:
    """Write ``requests`` as lines; returns how many. ``progress`` is told the number after every thousand."""
    number = 0
    for number, request in enumerate(requests, 1):
        file.write(format_line(request) + "\n")
        if number % 1000 == 0:
            progress(number)
    return number
