"""A simple model of the scheduler, to hold the real scheduler against.

The model knows the rules of docs/scheduler.md and checks every step that the scheduler plans. The device behind it
(tests/scheduler_device.py) draws from what it reads. What a request must stream follows from its prompt and seed alone,
so neither preemption, company nor cached pages may change it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from scheduler_device import VOCAB, Device, expected_stream, pages_for

from tokenspeed import _native

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass
class Request:
    id: int
    prompt: list[int]
    sampling: dict[str, Any]
    num_logprobs: int
    num_prompt_logprobs: int
    logprob_start_len: int
    expected: list[tuple[int, str | None]]
    max_new: int
    adjustments: dict[str, Any]
    deadline: int | None
    state: str = "waiting"
    planned: int = 0  # positions
    num_flying: int = 0  # steps in flight
    num_drawn: int = 0
    num_drawing: int = 0  # in flight
    next_prompt_row: int = 0  # its position
    drawn_at_preemption: int = -1
    slot: int = -1

    @property
    def penalties(self) -> tuple[float, ...]:
        return tuple(self.adjustments.get(name, off) for name, off in zip(PENALTIES, NO_PENALTIES, strict=True))

    def next_row(self) -> int:
        """Position of the next known token whose logits are needed."""
        return self.next_prompt_row if self.next_prompt_row < len(self.prompt) - 1 else len(self.known()) - 1

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
        self.requests: dict[int, Request] = {}  # whom the scheduler knows, in arrival order
        self.flying: list[tuple[Any, list[int]]] = []  # steps in flight, and the requests in each
        self.preempted: list[int] = []  # since the last step
        self.cached: set[int] = set()  # hashes, as the events tell
        self.num_hits = self.num_hits_with_rows = self.num_restored = 0
        self.now = 0
        self.next_id = 1

    def statuses(self) -> dict[int, Status]:
        return {id_: Status(*rest) for id_, *rest in self.scheduler.requests()}

    def live(self) -> dict[int, Request]:
        return {id_: request for id_, request in self.requests.items() if request.state != "draining"}

    def count(self, *states: str) -> int:
        return sum(request.state in states for request in self.requests.values())

    # -- what may be done ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        max_new: int,
        seed: int,
        *,
        logprobs: int = -1,
        prompt_logprobs: int = -1,
        logprob_start_len: int = 0,
        stops: list[int],
        adjustments: dict[str, Any] | None = None,
        deadline: int | None = None,
        **queue: int,
    ) -> None:
        id_, self.next_id = self.next_id, self.next_id + 1
        sampling = {"temperature": seed % 3 / 2, "top_p": 0.5 + seed % 2 / 2, "top_k": seed % 5, "min_p": seed % 4 / 4}
        sampling["seed"] = seed
        params = _native.RequestParams(
            max_new_tokens=max_new,
            num_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
            logprob_start_len=logprob_start_len,
            stop_token_ids=stops,
            deadline_ns=deadline,
            **sampling,
            **(adjustments or {}),
            **queue,
        )
        total = len(prompt) + max_new
        servable = total <= self.config.max_model_len and logprob_start_len <= len(prompt)
        servable = servable and pages_for(total, self.config.page_size) <= self.config.num_pages
        full = self.count("waiting") >= self.config.max_waiting
        try:
            self.scheduler.submit(id_, prompt, params, self.now)
        except ValueError:
            assert not servable
        except _native.QueueFull:
            assert servable and full
        else:
            assert servable and not full
            expected = expected_stream(prompt, seed, max_new, stops)
            request = Request(
                id_, prompt, sampling, logprobs, prompt_logprobs, logprob_start_len, expected, max_new,
                adjustments or {}, deadline,
            )  # fmt: skip
            request.next_prompt_row = max(0, logprob_start_len - 1) if prompt_logprobs >= 0 else len(prompt) - 1
            self.requests[id_] = request
        self.check()

    def plan(self) -> bool:
        """One next_step; whether there was one."""
        step = self.scheduler.next_step(self.now)
        after = self.statuses()
        if step is None:
            assert self.flying or not self.live(), "with no step in flight, some request can run"
            for id_, status in after.items():
                if status.state == "preempted" != self.requests[id_].state:
                    self.has_lost_its_place(id_)
        else:
            assert len(self.flying) < self.config.max_in_flight
            self.flying.append((step, self.check_step(step, after)))
        self.check()
        return step is not None

    def commit(self) -> None:
        step, members = self.flying.pop(0)
        tokens = self.device.run(step)
        rows = [id_ for id_, is_prompt_row, _ in step.rows if not is_prompt_row and id_ in self.live()]
        drawn = self.scheduler.commit(step.id, memoryview(tokens))
        assert [id_ for id_, _, _ in drawn] == rows
        for id_, token, finish in drawn:
            request = self.requests[id_]
            assert (token, finish) == request.expected[request.num_drawn]
            request.num_drawn += 1
            request.num_drawing -= 1
            if finish is not None:
                self.end(id_)
        self.release(members)
        self.check()

    def fail(self) -> None:
        step, members = self.flying.pop(0)
        self.device.fail(step)
        moved = step.num_moves > 0
        failed = self.scheduler.fail_step(step.id)
        mine = [id_ for id_ in members if id_ in self.live()]
        assert failed[: len(mine)] == mine and (moved or failed == mine)
        for id_ in failed:
            self.end(id_)
        self.release(members)
        self.check()

    def abort(self, id_: int) -> None:
        assert self.scheduler.abort(id_) == (id_ in self.live())
        if id_ in self.live():
            self.end(id_)
        self.check()

    def preempt(self, id_: int) -> None:
        request = self.requests.get(id_)
        can = request is not None and request.state in ("prefilling", "decoding") and request.num_flying == 0
        can = can and request.num_drawn > request.drawn_at_preemption
        assert self.scheduler.preempt(id_) == can
        if can:
            self.has_lost_its_place(id_)
        self.check()

    def wait(self, ns: int) -> None:
        self.now += ns
        due = [(r.deadline, id_) for id_, r in self.live().items() if r.deadline is not None and r.deadline <= self.now]
        assert self.scheduler.expire(self.now) == [id_ for _, id_ in sorted(due)]
        for _, id_ in due:
            self.end(id_)
        self.check()

    def drain(self) -> None:
        """Runs until idle, within a bound that holds only if no request waits without end."""
        bound = 4 * sum(len(request.prompt) + request.max_new for request in self.requests.values()) + 4
        for _ in range(bound):
            if self.scheduler.is_idle:
                break
            while self.plan():
                pass
            self.commit()
        assert self.scheduler.is_idle and not self.requests
        assert self.scheduler.num_free_pages + self.scheduler.num_cached_pages == self.config.num_pages

    # -- bookkeeping -----------------------------------------------------------------------------------

    def end(self, id_: int) -> None:
        request = self.requests[id_]
        assert request.state != "draining", "it ended twice"
        request.state = "draining"
        if request.num_flying == 0:
            del self.requests[id_]

    def release(self, members: list[int]) -> None:
        for id_ in members:
            request = self.requests[id_]
            request.num_flying -= 1
            if request.num_flying == 0 and request.state == "draining":
                del self.requests[id_]

    def has_lost_its_place(self, id_: int) -> None:
        request = self.requests[id_]
        assert request.num_flying == 0 and request.num_drawn > request.drawn_at_preemption
        request.drawn_at_preemption = request.num_drawn
        request.state, request.planned, request.slot = "preempted", 0, -1
        self.preempted.append(id_)

    # -- the rules -------------------------------------------------------------------------------------

    def check(self) -> None:
        """What always holds."""
        statuses = self.statuses()
        assert list(statuses) == list(self.requests)
        for id_, status in statuses.items():
            request = self.requests[id_]
            assert (status.state, status.in_flight) == (request.state, request.num_flying)
            if status.state in ("prefilling", "decoding"):
                assert status.positions == request.planned
                assert status.num_pages >= pages_for(status.positions, self.config.page_size)
            assert (status.num_pages > 0) == (status.state in ("prefilling", "decoding", "draining"))
        scheduler = self.scheduler
        assert scheduler.num_waiting == self.count("waiting", "preempted")
        assert scheduler.num_preempted == self.count("preempted")
        assert scheduler.num_running == self.count("prefilling", "decoding")
        assert self.count("prefilling") <= 1
        assert scheduler.num_in_flight == len(self.flying)
        assert scheduler.num_free_pages + scheduler.num_cached_pages <= self.config.num_pages
        for kind, *rest in scheduler.take_events():
            if kind == "stored":
                hash_, parent, key, tokens = rest
                assert hash_ not in self.cached and (parent is None or parent in self.cached)
                assert key == "" and len(tokens) == self.config.page_size
                self.cached.add(hash_)
            elif kind == "removed":
                self.cached.remove(rest[0])
            else:
                self.cached.clear()

    def check_admission(self, id_: int, cached: int, restored: int, waited: int, resumed: bool) -> None:
        request = self.requests[id_]
        assert request.state == ("preempted" if resumed else "waiting") and 0 <= waited <= self.now
        assert cached % self.config.page_size == 0 and 0 <= restored <= cached <= request.next_row()
        if request.penalties != NO_PENALTIES or not self.config.prefix_index:
            assert cached == 0
        request.state, request.planned = "prefilling", cached
        self.num_hits += cached > 0
        self.num_hits_with_rows += cached > 0 and request.next_prompt_row < len(request.prompt) - 1
        self.num_restored += restored > 0

    def check_step(self, step: Any, after: dict[int, Status]) -> list[int]:
        """Checks a planned step against the rules; returns the requests in it, one per sequence."""
        assert 1 <= step.num_seqs <= self.config.max_num_seqs
        assert step.num_seqs <= step.num_tokens <= self.config.max_prefill_tokens
        assert step.num_logit_rows <= self.config.max_logit_rows
        decision = step.decision
        for id_ in decision["preempted"]:
            if id_ in self.requests and self.requests[id_].state in ("prefilling", "decoding"):
                self.has_lost_its_place(id_)
        assert sorted(decision["preempted"]) == sorted(self.preempted)
        self.preempted = []
        assert [tuple(one.values()) for one in decision["admitted"]] == step.admitted
        for admission in step.admitted:
            self.check_admission(*admission)

        rows, members, adjusted = list(step.rows), [], 0
        for s in range(step.num_seqs):
            begin, end = step.cu_seqlens[s], step.cu_seqlens[s + 1]
            row = step.num_logit_rows - len(rows)
            if rows and step.logit_rows[row] < end:
                id_ = rows[0][0]
            else:  # a chunk without rows leaves its request prefilling
                (id_,) = [id_ for id_, status in after.items() if status.state == "prefilling"]
            request = self.requests[id_]
            assert id_ not in members and request.state in ("prefilling", "decoding")
            positions = list(step.positions[begin:end])
            assert positions and positions == list(range(request.planned, request.planned + len(positions)))
            is_decode = request.state == "decoding"
            assert is_decode == (s < decision["decodes"])
            taken = self.check_rows(step, rows, request, begin, positions, is_decode)
            draws = taken > 0 and not rows[taken - 1][1]
            rows = rows[taken:]
            draw_row = step.num_logit_rows - len(rows) - 1 if draws else -1
            adjusted += self.check_adjustment(step, adjusted, s, request, draw_row)
            assert draws or s == step.num_seqs - 1, "an incomplete prefill holds the line"
            request.state = "decoding" if draws else "prefilling"
            request.planned += len(positions)
            request.num_flying += 1
            members.append(id_)
        assert not rows and list(step.logit_rows) == sorted(set(step.logit_rows))
        self.check_order(step, members)
        self.check_sizes(step, adjusted)
        slots = [request.slot for request in self.requests.values() if request.slot >= 0]
        assert len(set(slots)) == len(slots)
        return members

    def check_order(self, step: Any, members: list[int]) -> None:
        """Who could decode is left out only for a want of pages."""
        for id_, request in self.requests.items():
            ends = len(request.prompt) + request.max_new - 1
            if request.state == "decoding" and request.planned < ends and id_ not in members:
                assert step.decision["held"] in ("decodes", "chunk first")
        assert step.is_decode_only == (step.decision["chunks"] == 0)

    def check_sizes(self, step: Any, adjusted: int) -> None:
        drawing_rows = sum(row >= 0 for row in step.adjust_row)
        assert len(step.adjust_seq) == adjusted and sum(a >= 0 for a in step.adjustment) == drawing_rows
        assert len(step.token_masks) == (1 + max([*step.mask_row, -1])) * pages_for(VOCAB, 32)
        assert len(step.bias_ids) == len(step.bias_values) == step.cu_biases[adjusted]

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
            due = [p for p in positions if request.next_prompt_row <= p < len(request.prompt) - 1]
            expected += [(request.id, True, p + 1) for p in due]
            request.next_prompt_row += len(due)
            assert request.next_prompt_row >= min(positions[-1] + 1, len(request.prompt) - 1)
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
    prefix_index = rng.random() < 0.8
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
        prefix_index=prefix_index,
        num_host_pages=rng.choice([0, rng.randint(1, pages_for(64, page_size))]),
        record_kv_events=rng.random() < 0.5,
        aging_ns=rng.choice([0, 50]),
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


def random_prompt(rng: random.Random) -> list[int]:
    """New, or the beginning of one of two texts, which others share."""
    text, length = rng.choice([None, 3, 5]), rng.randint(1, 12)
    prompt = [rng.randrange(VOCAB) if text is None else text * i * i % VOCAB for i in range(length)]
    return [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 2)))]


def random_submit(rng: random.Random, harness: Harness) -> None:
    prompt = random_prompt(rng)
    harness.submit(
        prompt,
        rng.randint(1, 20),
        rng.getrandbits(64),
        logprobs=rng.choice([-1, 0, 3]),
        prompt_logprobs=rng.choice([-1, -1, -1, 0, 5]),
        logprob_start_len=rng.choice([0, rng.randint(0, len(prompt)), len(prompt) + (rng.random() < 0.05)]),
        stops=rng.sample(range(VOCAB), rng.choice([0, 0, 0, 1])),
        adjustments=random_adjustments(rng),
        deadline=harness.now + rng.randint(0, 200) if rng.random() < 0.1 else None,
        priority=rng.choice([0, 0, 3, 9]),
        tenant=rng.randint(0, 2),
    )
