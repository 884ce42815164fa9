"""Which tokens the rows of recorded steps stand for.

A row's history is the tokens of its sequence up to it. It follows from a step's inputs alone: token ids, the page table
and the slots that earlier steps wrote, whichever request they were of. So rows of two recordings that have one history
must have the same bits, and nothing else needs to be known of requests, preemptions or shared pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.runtime.invariance.recording import RecordedStep, written_tokens

ROOT = 0
"""The history of no token."""
_DRAWING = ("logit_target", "temperature", "top_p", "min_p", "top_k", "seed", "draw_position", "num_logprobs")
"""Inputs of a logit row on which what it draws and reports depends."""
DrawKey = tuple[float, ...]


class Histories:
    """Numbers of histories: equal ones have one number. Shared by the recordings that are compared."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def after(self, history: int, token: int) -> int:
        """The history that ``token`` continues ``history`` to."""
        return self._numbers.setdefault((history, token), len(self._numbers) + 1)

    def chain(self, tokens: Sequence[int]) -> dict[int, int]:
        """The histories of a sequence's tokens: number -> position."""
        found, history = {}, ROOT
        for position, token in enumerate(tokens):
            history = self.after(history, token)
            found[history] = position
        return found


@dataclass(frozen=True)
class StepRows:
    """The histories of a step's token rows, and of its logit rows, whose ``draws`` say what is asked of each."""

    tokens: tuple[int, ...]
    logits: tuple[int, ...]
    draws: tuple[DrawKey, ...]


class Follower:
    """Follows the steps of one recording, in order."""

    def __init__(self, histories: Histories, page_size: int):
        self._histories = histories
        self._page_size = page_size
        self._slots: dict[int, int] = {}  # slot of a KV page -> history of what lies there
        self._last_tokens: dict[int, int] = {}

    def rows(self, step: RecordedStep) -> StepRows:
        """The rows of the next step; one whose history is not known, as when its sequence began before the recording,
        has one of its own."""
        ids, slots, positions = (step.input(name) for name in ("token_ids", "slot_mapping", "positions"))
        ends, table = step.input("cu_seqlens"), step.input("page_table")
        tokens: list[int] = []
        for sequence in range(step.sizes[1]):
            begin, end = ends[sequence], ends[sequence + 1]
            history = self._before(table, sequence * step.num_pages, positions[begin])
            for row in range(begin, end):
                token = ids[row] if ids[row] >= 0 else self._last_tokens.get(-1 - ids[row], ids[row])
                history = self._histories.after(history, token)
                tokens.append(history)
                self._slots[slots[row]] = history
        self._last_tokens.update(written_tokens(step))
        logits = tuple(tokens[row] for row in step.input("logit_rows"))
        draws = tuple(zip(*(step.input(name) for name in _DRAWING), strict=True))
        return StepRows(tuple(tokens), logits, draws)

    def _before(self, table: memoryview, row: int, position: int) -> int:
        if position == 0:
            return ROOT
        page, at = divmod(position - 1, self._page_size)
        return self._slots.get(table[row + page] * self._page_size + at, -1)
