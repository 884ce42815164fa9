"""The device behind the scheduler's model: one token per KV position, and draws from what it *reads there*.

A wrong page, position, slot, chunk or move of a page changes the stream, which follows from prompt and seed alone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any
from zlib import crc32

VOCAB = 11


def draw(seed: int, context: list[int]) -> int:
    """The token after ``context``: a fixed function of the seed and all tokens before it."""
    return crc32(array("i", context).tobytes(), seed & 0xFFFFFFFF) % VOCAB


def expected_stream(prompt: list[int], seed: int, max_new: int, stops: list[int]) -> list[tuple[int, str | None]]:
    known = list(prompt)
    stream: list[tuple[int, str | None]] = []
    while True:
        token = draw(seed, known)
        known.append(token)
        finish = "stop" if token in stops else "length" if len(stream) + 1 == max_new else None
        stream.append((token, finish))
        if finish is not None:
            return stream


def tokens_of(context: list[int], prompt_len: int) -> tuple[int, set[int], Counter[int]]:
    """What penalties look at: the tokens of the prompt, and how often each was drawn."""
    return prompt_len, set(context[:prompt_len]), Counter(context[prompt_len:])


def pages_for(positions: int, page_size: int) -> int:
    return -(-positions // page_size)


class Device:
    """Runs steps in order. KV memory (of the device and of the host) and last-token table start with garbage, which
    would show in a stream.

    (Where a step failed, a later one already in flight may well read garbage for requests that ended with it.)
    """

    GARBAGE = -99

    def __init__(self, config: Any):
        self.page_size: int = config.page_size
        self.row = pages_for(config.max_model_len, config.page_size)
        self.kv = [self.GARBAGE] * (config.num_pages * config.page_size)
        self.host = [self.GARBAGE] * (config.num_host_pages * config.page_size)
        self.last_tokens = [self.GARBAGE] * config.max_num_seqs
        self.counts = [Counter({self.GARBAGE: 1}) for _ in range(config.max_num_seqs)]
        self.in_prompt = [{self.GARBAGE} for _ in range(config.max_num_seqs)]

    def index(self, table: memoryview[int], position: int) -> int:
        return table[position // self.page_size] * self.page_size + position % self.page_size

    def page(self, number: int) -> slice:
        return slice(number * self.page_size, (number + 1) * self.page_size)

    def move(self, step: Any) -> None:
        for device_page, host_page in step.moves_out:
            self.host[self.page(host_page)] = self.kv[self.page(device_page)]
        for device_page, host_page in step.moves_in:
            self.kv[self.page(device_page)] = self.host[self.page(host_page)]

    def fail(self, step: Any) -> None:
        """The step began and failed: what it was to write is garbage."""
        garbage = [self.GARBAGE] * self.page_size
        for _, host_page in step.moves_out:
            self.host[self.page(host_page)] = garbage
        for device_page, _ in step.moves_in:
            self.kv[self.page(device_page)] = garbage
        for slot in step.slot_mapping:
            self.kv[slot] = self.GARBAGE
        for slot in step.state_slot:
            if slot >= 0:
                self.last_tokens[slot] = self.GARBAGE

    def run(self, step: Any) -> array[int]:
        self.move(step)
        out = array("i", [0] * step.num_logit_rows)
        row_of = {token_row: r for r, token_row in enumerate(step.logit_rows)}
        for s in range(step.num_seqs):
            table = step.page_table[s * self.row : (s + 1) * self.row]
            counted = self.count(step, s)
            for t in range(step.cu_seqlens[s], step.cu_seqlens[s + 1]):
                token, position = step.token_ids[t], step.positions[t]
                if token < 0:
                    token = self.last_tokens[-1 - token]
                assert step.slot_mapping[t] == self.index(table, position)
                self.kv[step.slot_mapping[t]] = token
                if t not in row_of:
                    continue
                r = row_of[t]
                context = [self.kv[self.index(table, p)] for p in range(position + 1)]
                assert step.draw_position[r] == position + 1
                target = step.logit_target[r]
                out[r] = draw(step.seed[r], context) if target < 0 else target
                if target < 0 and counted is not None and counted != tokens_of(context, counted[0]):
                    out[r] = (out[r] + 1) % VOCAB  # whoever counts wrongly draws wrongly
                if step.state_slot[r] >= 0:
                    self.last_tokens[step.state_slot[r]] = out[r]
            assert step.context_lens[s] == step.positions[step.cu_seqlens[s + 1] - 1] + 1
        return out

    def count(self, step: Any, s: int) -> tuple[int, set[int], Counter[int]] | None:
        """Enter the tokens of sequence ``s`` where penalties count them: what ``tokens_of`` its context should be."""
        for a in range(len(step.adjust_seq)):
            slot = step.count_slot[a]
            if step.adjust_seq[a] != s or slot < 0:
                continue
            begin, end, prompt_len = step.cu_seqlens[s], step.cu_seqlens[s + 1], step.prompt_lens[a]
            if step.positions[begin] == 0:
                self.counts[slot], self.in_prompt[slot] = Counter(), set()
            for t in range(begin, end):
                token = step.token_ids[t] if step.token_ids[t] >= 0 else self.last_tokens[-1 - step.token_ids[t]]
                if step.positions[t] < prompt_len:
                    self.in_prompt[slot].add(token)
                else:
                    self.counts[slot][token] += 1
            return prompt_len, self.in_prompt[slot], self.counts[slot]
        return None
