"""Holds a dump against the engine, to the last bit, and the engine against itself."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenspeed.errors import DumpError
from tokenspeed.runtime.align.dump import Dump
from tokenspeed.runtime.align.dump import Sequence as DumpSequence
from tokenspeed.runtime.align.runs import Outcome, Run, first_logits, generate, teacher_force
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.request import SamplingParams

CHECKS = {
    "trainer": "the engine's log-probability of every token, teacher-forced, is that of the dump",
    "logits": "the engine's logits behind the first token are those of the dump",
    "packed": "teacher-forced among others, a sequence has the log-probabilities that it has alone",
    "generated": "teacher-forced, a reply has the log-probabilities that were reported while it was drawn",
    "replies": "from the prompt and the seed of the dump, the engine draws the reply of the dump",
}
COMPANIONS = 4
"""Sequences that run beside that of a dump which has no other: its own beginnings."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Mismatch:
    """The first place that differs.

    Attributes:
        sequence: number of the sequence in the dump.
        position: of the token in its sequence; in check "logits" the token id whose logit it is.
        token: the token there.
        expected, found: values; token ids in check "replies".
        expected_bits, found_bits: of float32 values, in hexadecimal; empty for token ids.
        ulps: float32 values from one to the other; None where that means nothing.
    """

    sequence: int
    position: int
    token: int
    expected: float
    found: float
    expected_bits: str = ""
    found_bits: str = ""
    ulps: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Of one check: of ``compared`` values ``different`` differ, by ``largest`` at most (None for token ids)."""

    check: str
    compared: int
    different: int = 0
    largest: float | None = None
    first: Mismatch | None = None

    @property
    def passed(self) -> bool:
        return self.different == 0

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinite ones as text, for which JSON has no number."""
        data = {**asdict(self), "passed": self.passed}
        parts: list[dict[str, Any]] = [data] if self.first is None else [data, data["first"]]
        for part in parts:
            for name, value in part.items():
                if isinstance(value, float) and not math.isfinite(value):
                    part[name] = str(value)
        return data


@dataclass(frozen=True)
class _Row:
    """Values to compare: the first belongs to position ``begin`` of a sequence."""

    sequence: int
    ids: Sequence[int]
    begin: int
    expected: Sequence[float]
    found: Sequence[float]


def check_dump(engine: Engine, dump: Dump, progress: Progress = lambda name: None) -> list[Verdict]:
    """Every check that the dump allows, in the order of CHECKS.

    Raises DumpError for a dump that is not for this artifact: other vocabulary, or too long.
    """
    _require_fit(engine, dump)
    progress("trainer")
    ids = [s.ids for s in dump.sequences]
    alone = teacher_force(engine, ids, together=False)
    verdicts = [_compare("trainer", _rows(ids, [s.logprob for s in dump.sequences], alone))]
    if dump.first_logits is not None:
        progress("logits")
        found = first_logits(engine, ids[0][0])
        verdicts.append(_compare("logits", [_Row(0, range(len(found)), 0, dump.first_logits, found)]))
    progress("packed")
    verdicts.append(_compare("packed", _rows(ids, alone, _packed(engine, ids))))
    replied = [(n, s) for n, s in enumerate(dump.sequences) if s.prompt_len not in (None, len(s.ids))]
    if replied:
        progress("generated")
        verdicts += _check_replies(engine, replied, dump.temperature)
    return verdicts


def _rows(ids: list[list[int]], expected: list[list[float]], found: list[list[float]]) -> list[_Row]:
    return [_Row(n, *row) for n, row in enumerate(zip(ids, [1] * len(ids), expected, found, strict=True))]


def ulps_between(a: float, b: float) -> int | None:
    """How many float32 values lie from ``a`` to ``b``, the one after 0 being the smallest; None for a NaN."""
    if math.isnan(a) or math.isnan(b):
        return None
    return abs(_rank(a) - _rank(b))


def bits_of(value: float) -> str:
    """The float32 ``value`` as eight hexadecimal digits."""
    return struct.pack(">f", value).hex()


def _rank(value: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits) if bits >= 0 else -(int(bits) & 0x7FFFFFFF)


def _require_fit(engine: Engine, dump: Dump) -> None:
    info = engine.info
    for number, sequence in enumerate(dump.sequences):
        if len(sequence.ids) > info.max_model_len:
            raise DumpError(
                f"sequence {number} has {len(sequence.ids)} tokens, and the artifact was built for max_model_len"
                f" {info.max_model_len}",
                hint="dump shorter sequences, or rebuild with a larger `tokenspeed build --max-model-len`",
            )
        for position, token in enumerate(sequence.ids):
            if not 0 <= token < info.vocab_size:
                raise DumpError(
                    f"token {position} of sequence {number} is {token}: token ids of this artifact go from 0 to"
                    f" {info.vocab_size - 1}",
                    hint="the dump is of another model",
                )
    if not any(sequence.logprob for sequence in dump.sequences):
        raise DumpError("there is nothing to compare: no sequence has a second token")
    if dump.first_logits is not None and len(dump.first_logits) != info.vocab_size:
        raise DumpError(
            f"first_logits has {len(dump.first_logits)} values, and the artifact's vocabulary {info.vocab_size}",
            hint="the dump is of another model, or pads its vocabulary: leave what is padded out",
        )


def _packed(engine: Engine, ids: list[list[int]]) -> list[list[float]]:
    """Teacher-forced among others: those of the dump, or beginnings of the only one."""
    beginnings = (ids[0][: len(ids[0]) * i // (COMPANIONS + 1)] for i in range(1, COMPANIONS + 1))
    companions = [b for b in beginnings if b] if len(ids) == 1 else []
    return teacher_force(engine, [*ids, *companions], together=True)[: len(ids)]


def _check_replies(
    engine: Engine, replied: Sequence[tuple[int, DumpSequence]], temperature: float | None
) -> list[Verdict]:
    """Draw the replies again, teacher-force what was drawn, and compare that with what was told as it was drawn."""
    outcomes = generate(engine, [_run(s, temperature) for _, s in replied], together=True)
    drawn = [s.ids[: s.prompt_len] + o.ids for (_, s), o in zip(replied, outcomes, strict=True)]
    forced = teacher_force(engine, drawn, together=False)
    rows = [
        _Row(number, ids, len(ids) - len(o.ids), o.logprob, f[len(f) - len(o.ids) :])
        for (number, _), ids, o, f in zip(replied, drawn, outcomes, forced, strict=True)
    ]
    verdicts = [_compare("generated", rows)]
    if temperature is not None:
        verdicts.append(_compare_replies(replied, outcomes))
    return verdicts


def _run(sequence: DumpSequence, temperature: float | None) -> Run:
    assert sequence.prompt_len is not None
    number = len(sequence.ids) - sequence.prompt_len
    params = SamplingParams(max_tokens=number, temperature=temperature or 0.0, logprobs=0, ignore_eos=True)
    return Run(sequence.ids[: sequence.prompt_len], params, sequence.seed or 0)


def _compare(check: str, rows: Sequence[_Row]) -> Verdict:
    compared = different = 0
    largest, first = 0.0, None
    for row in rows:
        for i, (a, b) in enumerate(zip(row.expected, row.found, strict=True)):
            compared += 1
            if bits_of(a) == bits_of(b):
                continue
            different += 1
            largest = max(largest, abs(a - b) if a != b else 0.0)
            if first is None:
                at = row.begin + i
                bits = bits_of(a), bits_of(b)
                first = Mismatch(row.sequence, at, row.ids[at], a, b, *bits, ulps_between(a, b))
    return Verdict(check, compared, different, largest, first)


def _compare_replies(replied: Sequence[tuple[int, DumpSequence]], outcomes: Sequence[Outcome]) -> Verdict:
    compared = different = 0
    first = None
    for (number, sequence), outcome in zip(replied, outcomes, strict=True):
        begin = len(sequence.ids) - len(outcome.ids)
        for position, (a, b) in enumerate(zip(sequence.ids[begin:], outcome.ids, strict=True), begin):
            compared += 1
            different += a != b
            if a != b and first is None:
                first = Mismatch(number, position, a, a, b)
    return Verdict("replies", compared, different, None, first)
