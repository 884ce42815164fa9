"""A simple model of the scheduler and of the device behind it, to hold the real scheduler against.

The model knows the rules of docs/scheduler.md and checks every step that the scheduler plans. The device keeps
one token per KV position and draws from what it *reads there*: a wrong page, position, slot or chunk changes the
stream. What a request must stream follows from its prompt and seed alone, so neither preemption nor company may
change it.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from tokenspeed import _native

VOCAB = 11
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NO_PENALTIES = (1.0, 0.0, 0.0)


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
    """Runs steps in order. KV memory and last-token table start with garbage, which would show in a stream.

    (Where a step failed, a later one already in flight may well read garbage for requests that ended with it.)
    """

    GARBAGE = -99

    def __init__(self, config: Any):
        self.page_size: int = config.page_size
        self.row = pages_for(config.max_model_len, config.page_size)
        self.kv = [self.GARBAGE] * (config.num_pages * config.page_size)
        self.last_tokens = [self.GARBAGE] * config.max_num_seqs
        self.counts = [Counter({self.GARBAGE: 1}) for _ in range(config.max_num_seqs)]
        self.in_prompt = [{self.GARBAGE} for _ in range(config.max_num_seqs)]

    def index(self, table: memoryview[int], position: int) -> int:
        return table[position // self.page_size] * self.page_size + position % self.page_size

    def run(self, step: Any) -> array[int]:
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


@dataclass
class Request:
    id: int
    prompt: list[int]
    sampling: dict[str, Any]
    num_logprobs: int
    num_prompt_logprobs: int
    expected: list[tuple[int, str | None]]
    max_new: int
    adjustments: dict[str, Any]
    num_drawn: int = 0
    num_drawing: int = 0  # in flight
    num_prompt_rows: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1

    @property
    def penalties(self) -> tuple[float, ...]:
        return tuple(self.adjustments.get(name, off) for name, off in zip(PENALTIES, NO_PENALTIES, strict=True))

    def known(self) -> list[int]:
        return self.prompt + [token for token, _ in self.expected[: self.num_drawn]]


@dataclass
class Status:
    state: str = "waiting"
    in_flight: int = 0
    num_pages: int = 0
    positions: int = 0


class Harness:
    """A scheduler, its model and its device. Every method checks what the scheduler answers."""

    def __init__(self, config: Any):
        self.config = config
        self.scheduler = _native.Scheduler(config)
        self.device = Device(config)
        self.live: dict[int, Request] = {}  # in arrival order
        self.draining: dict[int, Request] = {}  # ended, but a step in flight still uses their pages
        self.flying: list[tuple[Any, list[int]]] = []  # steps in flight, and the requests in each
        self.next_id = 1

    def statuses(self) -> dict[int, Status]:
        return {id_: Status(*rest) for id_, *rest in self.scheduler.requests()}

    # -- what may be done ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        max_new: int,
        seed: int,
        *,
        logprobs: int,
        prompt_logprobs: int,
        stops: list[int],
        adjustments: dict[str, Any] | None = None,
    ) -> None:
        id_, self.next_id = self.next_id, self.next_id + 1
        sampling = {"temperature": seed % 3 / 2, "top_p": 0.5 + seed % 2 / 2, "top_k": seed % 5, "min_p": seed % 4 / 4}
        sampling["seed"] = seed
        params = _native.RequestParams(
            max_new_tokens=max_new,
            num_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
            stop_token_ids=stops,
            **sampling,
            **(adjustments or {}),
        )
        total = len(prompt) + max_new
        servable = total <= self.config.max_model_len
        servable = servable and pages_for(total, self.config.page_size) <= self.config.num_pages
        full = self.scheduler.num_waiting >= self.config.max_waiting
        try:
            self.scheduler.submit(id_, prompt, params)
        except ValueError:
            assert not servable
        except _native.QueueFull:
            assert servable and full
        else:
            assert servable and not full
            expected = expected_stream(prompt, seed, max_new, stops)
            self.live[id_] = Request(
                id_, prompt, sampling, logprobs, prompt_logprobs, expected, max_new, adjustments or {}
            )
        self.check_conservation()

    def plan(self) -> bool:
        """One next_step; whether there was one."""
        before = self.statuses()
        step = self.scheduler.next_step()
        after = self.statuses()
        if step is None:
            assert self.flying or not self.live, "with no step in flight, the oldest request can always run"
            return False
        members = self.check_step(step, before, after)
        self.flying.append((step, members))
        self.check_conservation()
        return True

    def commit(self) -> None:
        step, members = self.flying.pop(0)
        tokens = self.device.run(step)
        drawn = self.scheduler.commit(step.id, memoryview(tokens))
        rows = [id_ for id_, is_prompt_row, _ in step.rows if not is_prompt_row and id_ in self.live]
        assert [id_ for id_, _, _ in drawn] == rows
        for id_, token, finish in drawn:
            request = self.live[id_]
            assert (token, finish) == request.expected[request.num_drawn]
            request.num_drawn += 1
            request.num_drawing -= 1
            if finish is not None:
                self.end(id_)
        self.forget(members)
        self.check_conservation()

    def fail(self) -> None:
        step, members = self.flying.pop(0)
        failed = self.scheduler.fail_step(step.id)
        assert failed == [id_ for id_ in members if id_ in self.live]
        for id_ in failed:
            self.end(id_)
        self.forget(members)
        self.check_conservation()

    def abort(self, id_: int) -> None:
        assert self.scheduler.abort(id_) == (id_ in self.live)
        if id_ in self.live:
            self.end(id_)
        self.check_conservation()

    def drain(self) -> None:
        """Runs until idle, within a bound that holds only if the oldest request moves on in every round."""
        bound = 2 * sum(len(request.prompt) + request.max_new for request in self.live.values()) + 4
        for _ in range(bound):
            if self.scheduler.is_idle:
                break
            while self.plan():
                pass
            self.commit()
        assert self.scheduler.is_idle and not self.live and not self.draining
        assert self.scheduler.num_free_pages == self.config.num_pages

    # -- bookkeeping -----------------------------------------------------------------------------------

    def end(self, id_: int) -> None:
        request = self.live.pop(id_)  # KeyError: it ended twice
        if any(id_ in members for _, members in self.flying):
            self.draining[id_] = request

    def forget(self, members: list[int]) -> None:
        for id_ in members:
            if id_ in self.draining and not any(id_ in others for _, others in self.flying):
                del self.draining[id_]

    # -- the rules -------------------------------------------------------------------------------------

    def check_conservation(self) -> None:
        statuses = self.statuses()
        assert set(statuses) == set(self.live) | set(self.draining)
        for id_, status in statuses.items():
            assert status.num_pages == pages_for(status.positions, self.config.page_size)
            assert status.in_flight == sum(id_ in members for _, members in self.flying)
            assert (status.state == "draining") == (id_ in self.draining)
        held = sum(status.num_pages for status in statuses.values())
        assert held == self.config.num_pages - self.scheduler.num_free_pages
        waiting = [id_ for id_, status in statuses.items() if status.state == "waiting"]
        running = [id_ for id_, status in statuses.items() if status.state in ("prefilling", "decoding")]
        assert (len(waiting), len(running)) == (self.scheduler.num_waiting, self.scheduler.num_running)
        assert not running or not waiting or max(running) < min(waiting)  # ids are in arrival order

    def check_step(self, step: Any, before: dict[int, Status], after: dict[int, Status]) -> list[int]:
        """Checks a planned step against the rules; returns the requests in it, one per sequence."""
        assert 1 <= step.num_seqs <= self.config.max_num_seqs
        assert step.num_seqs <= step.num_tokens <= self.config.max_prefill_tokens
        assert step.num_logit_rows <= self.config.max_logit_rows
        for id_, status in after.items():
            if status.state == "waiting":  # perhaps preempted just now
                self.live[id_].pages, self.live[id_].slot = [], -1
        members = [id_ for id_ in after if after[id_].in_flight > before[id_].in_flight]
        decodes = [id_ for id_ in members if before[id_].state == "decoding"]
        chunks = [id_ for id_ in members if before[id_].state != "decoding"]
        assert decodes + chunks == decodes + sorted(chunks)
        assert step.is_decode_only == (not chunks)
        members = sorted(decodes) + sorted(chunks)
        assert len(members) == step.num_seqs
        # Arrival order: who cannot join a step keeps all younger requests out of it.
        able = [id_ for id_, request in self.live.items() if request.num_drawn + request.num_drawing < request.max_new]
        assert sorted(members) == able[: len(members)]

        rows = list(step.rows)
        adjusted = 0
        for s, id_ in enumerate(members):
            begin, end = step.cu_seqlens[s], step.cu_seqlens[s + 1]
            positions = list(step.positions[begin:end])
            first = before[id_].positions if before[id_].state != "waiting" else 0
            assert positions == list(range(first, after[id_].positions)) and positions
            self.check_pages(step, s, self.live[id_], after[id_])
            taken = self.check_rows(step, rows, self.live[id_], begin, positions, id_ in decodes)
            rows = rows[taken:]
            complete = taken > 0 and not step.rows[len(step.rows) - len(rows) - 1][1]
            draw_row = len(step.rows) - len(rows) - 1 if complete else -1
            adjusted += self.check_adjustment(step, adjusted, s, self.live[id_], draw_row)
            assert complete or s == step.num_seqs - 1, "an incomplete prefill holds the line"
        assert not rows and list(step.logit_rows) == sorted(set(step.logit_rows))
        assert len(step.adjust_seq) == adjusted and sum(a >= 0 for a in step.adjustment) == sum(
            row >= 0 for row in step.adjust_row
        )
        assert len(step.token_masks) == (1 + max([*step.mask_row, -1])) * pages_for(VOCAB, 32)
        assert len(step.bias_ids) == len(step.bias_values) == step.cu_biases[adjusted]
        slots = [request.slot for request in self.holders() if request.slot >= 0]
        assert len(set(slots)) == len(slots)
        return members

    def holders(self) -> list[Request]:
        return [*self.live.values(), *self.draining.values()]

    def check_pages(self, step: Any, s: int, request: Request, status: Status) -> None:
        """Pages only grow at the end, and no other request holds one of them."""
        first = s * self.device.row
        pages = list(step.page_table[first : first + status.num_pages])
        assert pages[: len(request.pages)] == request.pages
        request.pages = pages
        everyone = [page for holder in self.holders() for page in holder.pages]
        assert len(set(everyone)) == len(everyone) and all(0 <= page < self.config.num_pages for page in everyone)

    def check_rows(
        self, step: Any, rows: list[Any], request: Request, begin: int, positions: list[int], is_decode: bool
    ) -> int:
        """Checks the tokens of one sequence and the logit rows due for them; returns how many rows those are."""
        tokens = list(step.token_ids[begin : begin + len(positions)])
        known = request.known()
        expected: list[tuple[int, bool, int]] = []
        if is_decode:
            assert tokens == [-1 - request.slot] and request.slot >= 0
            draws = True
        else:
            assert tokens == known[positions[0] : positions[-1] + 1]
            if request.num_prompt_logprobs >= 0:
                due = [p + 1 for p in positions if request.num_prompt_rows < p + 1 < len(request.prompt)]
                expected += [(request.id, True, p) for p in due]
                request.num_prompt_rows += len(due)
                assert request.num_prompt_rows >= min(positions[-1] + 1, len(request.prompt) - 1)
            draws = positions[-1] + 1 == len(known)
        if draws:
            expected.append((request.id, False, positions[-1] + 1))
            request.num_drawing += 1
        assert rows[: len(expected)] == expected
        offset = step.num_logit_rows - len(rows)
        for r, (_, is_prompt_row, position) in enumerate(expected, offset):
            assert step.logit_rows[r] == begin + position - 1 - positions[0]
            assert step.logit_target[r] == (request.prompt[position] if is_prompt_row else -1)
            assert step.num_logprobs[r] == (request.num_prompt_logprobs if is_prompt_row else request.num_logprobs)
            assert {name: getattr(step, name)[r] for name in SAMPLING} == request.sampling
            if is_prompt_row:
                assert step.state_slot[r] == -1
            elif request.slot < 0:
                request.slot = step.state_slot[r]
            assert is_prompt_row or step.state_slot[r] == request.slot >= 0
        return len(expected)

    def check_adjustment(self, step: Any, a: int, s: int, request: Request, draw_row: int) -> int:
        """Checks what sequence ``s`` asks of its logits, which would be adjustment ``a``; returns how many it has."""
        asked, counts = request.adjustments, request.penalties != NO_PENALTIES
        if not counts and (draw_row < 0 or not asked.keys() & {"bias_ids", "token_mask"}):
            assert draw_row < 0 or step.adjustment[draw_row] == -1
            return 0
        assert draw_row < 0 or step.adjustment[draw_row] == a
        assert (step.adjust_seq[a], step.adjust_row[a], step.prompt_lens[a]) == (s, draw_row, len(request.prompt))
        if counts and request.slot < 0:
            request.slot = step.count_slot[a]
        assert step.count_slot[a] == (request.slot if counts else -1) and (request.slot >= 0 or not counts)
        assert tuple(getattr(step, name)[a] for name in PENALTIES) == request.penalties
        biases = slice(step.cu_biases[a], step.cu_biases[a + 1])
        own = asked if draw_row >= 0 else {}
        assert list(step.bias_ids[biases]) == own.get("bias_ids", [])
        assert list(step.bias_values[biases]) == own.get("bias_values", [])
        mask = step.mask_row[a]
        assert (mask >= 0) == ("token_mask" in own) and (
            mask < 0 or list(step.token_masks)[mask] == own["token_mask"][0]
        )
        return 1


def random_config(rng: random.Random, max_in_flight: int) -> Any:
    """A config of numbers so small that every limit is met."""
    max_num_seqs = rng.randint(1, 4)
    max_prefill_tokens = rng.randint(max_num_seqs, 12)
    page_size = rng.choice([1, 2, 4])
    return _native.SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill_tokens,
        max_logit_rows=rng.randint(max_num_seqs, max_prefill_tokens),
        max_model_len=32,
        page_size=page_size,
        num_pages=rng.randint(pages_for(16, page_size), pages_for(48, page_size)),
        max_waiting=rng.randint(1, 8),
        max_in_flight=max_in_flight,
        vocab_size=VOCAB,
    )


def random_adjustments(rng: random.Random) -> dict[str, Any]:
    """Penalties, biases and a mask, each for some requests; most have none. Exact in float32."""
    adjustments: dict[str, Any] = {name: 0.25 * rng.randint(1, 6) for name in PENALTIES if rng.random() < 0.2}
    if rng.random() < 0.2:
        ids = sorted(rng.sample(range(VOCAB), rng.randint(1, 5)))
        adjustments |= {"bias_ids": ids, "bias_values": [rng.randint(-8, 8) / 4 for _ in ids]}
    if rng.random() < 0.2:
        adjustments["token_mask"] = [rng.getrandbits(VOCAB)]
    return adjustments


def random_submit(rng: random.Random, harness: Harness) -> None:
    harness.submit(
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))],
        rng.randint(1, 20),
        rng.getrandbits(64),
        logprobs=rng.choice([-1, 0, 3]),
        prompt_logprobs=rng.choice([-1, -1, 0, 5]),
        stops=rng.sample(range(VOCAB), rng.choice([0, 0, 0, 1])),
        adjustments=random_adjustments(rng),
    )
