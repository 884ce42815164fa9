"""Steps made by hand: what the scheduler plans, for whoever measures the executor alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenspeed.step import INPUTS, IO, STEP_SIZES, mask_words

_TYPECODES = {"int32": "i", "int64": "q", "uint64": "Q", "float32": "f"}


@dataclass(frozen=True)
class Sampling:
    """How one row draws; the names are those of the step's inputs."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    num_logprobs: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_biases: int = 0
    mask: int | None = None
    """Every word of the row's token mask, or None: every token is allowed."""

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusted(self) -> bool:
        return self.penalized or self.num_biases > 0 or self.mask is not None


@dataclass
class SequencePart:
    """One sequence in a step.

    Attributes:
        tokens: ids of its tokens here; one of None is a decode that reads the last-token table at ``slot``.
        first_position: of the first of them.
        pages: its KV pages from position 0 on.
        slot: of the request.
        prompt_rows: indexes into ``tokens``, ascending, whose successor's log-probability is asked.
        sampling: how its last token draws; None draws nothing.
    """

    tokens: Sequence[int | None]
    first_position: int
    pages: Sequence[int]
    slot: int
    prompt_rows: Sequence[int] = ()
    sampling: Sampling | None = None
    seed: int = 0


@dataclass
class MadeStep:
    """A step of ``sequences``, as ``runtime.executor.Step`` describes it.

    Args:
        page_size: positions of a KV page.
        pages_per_seq: entries of a page table row.
        vocab_size: of token masks.
    """

    id: int
    sequences: Sequence[SequencePart]
    page_size: int
    pages_per_seq: int
    vocab_size: int
    num_tokens: int = 0
    num_seqs: int = 0
    num_logit_rows: int = 0
    num_moves: int = 0
    moves_out: Sequence[tuple[int, int]] = ()
    moves_in: Sequence[tuple[int, int]] = ()
    _arrays: dict[str, array[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._arrays = {t.name: array(_TYPECODES[t.dtype]) for t in INPUTS}
        self._arrays["cu_seqlens"].append(0)
        self._arrays["cu_biases"].append(0)
        for sequence in self.sequences:
            self._add(sequence)
        a, words = self._arrays, mask_words(self.vocab_size)
        counts = (len(a["adjust_seq"]), len(a["bias_ids"]), len(a["token_masks"]) // words)
        sizes = (self.num_tokens, self.num_seqs, self.num_logit_rows, *counts, 0, 0)
        self._arrays[STEP_SIZES.name] = array("i", sizes)

    def copy_to(self, io: memoryview, offsets: Sequence[int], /) -> None:
        for tensor, offset in zip(IO, offsets, strict=False):  # inputs come first
            data = memoryview(self._arrays[tensor.name]).cast("B")
            io[offset : offset + len(data)] = data

    def _add(self, sequence: SequencePart) -> None:
        a = self._arrays
        for i, token in enumerate(sequence.tokens):
            position = sequence.first_position + i
            a["token_ids"].append(-1 - sequence.slot if token is None else token)
            a["positions"].append(position)
            page = sequence.pages[position // self.page_size]
            a["slot_mapping"].append(page * self.page_size + position % self.page_size)
        end = sequence.first_position + len(sequence.tokens)
        a["context_lens"].append(end)
        a["page_table"].extend(sequence.pages)
        a["page_table"].extend([0] * (self.pages_per_seq - len(sequence.pages)))
        asked = replace(sequence.sampling or Sampling(), num_logprobs=0)
        for i in sequence.prompt_rows:
            target = sequence.tokens[i + 1]
            assert target is not None
            self._add_row(i, target, asked, sequence, sequence.first_position + i + 1, -1)
        if sequence.sampling is not None:
            self._add_row(len(sequence.tokens) - 1, -1, sequence.sampling, sequence, end, sequence.slot)
            if sequence.sampling.adjusted:
                self._add_adjustment(sequence.sampling, sequence)
        self.num_tokens += len(sequence.tokens)
        self.num_seqs += 1
        a["cu_seqlens"].append(self.num_tokens)

    def _add_row(
        self, token: int, target: int, sampling: Sampling, sequence: SequencePart, position: int, slot: int
    ) -> None:
        values = {
            "logit_rows": self.num_tokens + token,
            "logit_target": target,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "top_k": sampling.top_k,
            "seed": sequence.seed,
            "draw_position": position,
            "num_logprobs": sampling.num_logprobs,
            "state_slot": slot,
            "adjustment": -1,
        }
        for name, value in values.items():
            self._arrays[name].append(value)
        self.num_logit_rows += 1

    def _add_adjustment(self, sampling: Sampling, sequence: SequencePart) -> None:
        """Of the row added last; every token counts as the prompt's."""
        a = self._arrays
        a["adjustment"][-1] = len(a["adjust_seq"])
        biases = min(sampling.num_biases, self.vocab_size)
        a["bias_ids"].extend(i * self.vocab_size // biases for i in range(biases))
        a["bias_values"].extend([1.0] * biases)
        values = {
            "adjust_seq": self.num_seqs,
            "adjust_row": self.num_logit_rows - 1,
            "count_slot": sequence.slot if sampling.penalized else -1,
            "prompt_lens": sequence.first_position + len(sequence.tokens),
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "cu_biases": len(a["bias_ids"]),
            "mask_row": -1,
        }
        if sampling.mask is not None:
            words = mask_words(self.vocab_size)
            values["mask_row"] = len(a["token_masks"]) // words
            a["token_masks"].extend([sampling.mask] * words)
        for name, value in values.items():
            a[name].append(value)
