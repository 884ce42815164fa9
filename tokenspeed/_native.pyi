# Types of the compiled module; made by `python -m nanobind.stubgen -m tokenspeed._native`. A test keeps it equal to that.
"""TokenSpeed's C++: the scheduler (control plane) and the devices."""

from collections.abc import Iterator, Sequence
from typing import Any


class QueueFull(Exception):
    pass

class SchedulerConfig:
    """The envelope's limits, and policy. Scheduler(config) checks them."""

    def __init__(self, max_num_seqs: int, max_prefill_tokens: int, max_logit_rows: int, max_model_len: int, page_size: int, num_pages: int, max_waiting: int, max_in_flight: int = 1, vocab_size: int = 0, prefix_index: bool = True, num_host_pages: int = 0, cache_salt: str = '', record_kv_events: bool = False, aging_ns: int = 0) -> None: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_prefill_tokens(self) -> int: ...

    @property
    def max_logit_rows(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def max_waiting(self) -> int: ...

    @property
    def max_in_flight(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Of logit biases and token masks; 0: no request has any."""

    @property
    def prefix_index(self) -> bool:
        """Whether pages of one request are found by the next."""

    @property
    def num_host_pages(self) -> int:
        """Of the host tier; 0: there is none."""

    @property
    def cache_salt(self) -> str:
        """Of the prefix index: the artifact's digest."""

    @property
    def record_kv_events(self) -> bool: ...

    @property
    def aging_ns(self) -> int:
        """Waiting that long makes up for one priority class; 0: never."""

class RequestParams:
    """
    What one request asks of the scheduler. num_logprobs and num_prompt_logprobs: -1 is none;
    logprob_start_len: positions of the prompt from here on have log-probabilities.
    bias_ids ascend; token_mask has a bit for each token of the vocabulary, or is empty.
    priority: class 0 (first) to 9. tenant: whose fair share it counts for. deadline_ns: on the
    clock of now_ns; None: none. cache_key: prefixes are shared within one.
    """

    def __init__(self, max_new_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float, seed: int, num_logprobs: int = -1, num_prompt_logprobs: int = -1, stop_token_ids: Sequence[int] = [], repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, bias_ids: Sequence[int] = [], bias_values: Sequence[float] = [], token_mask: Sequence[int] = [], priority: int = 0, tenant: int = 0, deadline_ns: int | None = None, cache_key: str = '', logprob_start_len: int = 0) -> None: ...

class Step:
    """
    One forward pass. Arrays are read-only memoryviews named as tokenspeed/step.py INPUTS;
    page_table and token_masks are flat. They are the scheduler's, which writes them anew once the
    step has committed or failed, and keep its memory alive.
    """

    @property
    def id(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_seqs(self) -> int: ...

    @property
    def num_logit_rows(self) -> int: ...

    @property
    def is_decode_only(self) -> bool:
        """Every sequence is one decode: no prefill chunk."""

    @property
    def rows(self) -> list[tuple[int, bool, int]]:
        """
        (request_id, is_prompt_row, position of the token asked for or drawn) of every logit row.
        """

    @property
    def num_admitted(self) -> int: ...

    @property
    def admitted(self) -> list[tuple[int, int, int, int, bool]]:
        """
        Of each request that left the queue with this step: (request_id, tokens found in the prefix index,
        tokens of these that come back from the host tier, nanoseconds waited, whether it was preempted).
        """

    @property
    def decision(self) -> dict[str, object]:
        """
        What was decided with the step, and why no more: counts, admitted and preempted requests.
        """

    @property
    def num_moves(self) -> int: ...

    @property
    def moves_out(self) -> list[tuple[int, int]]:
        """
        (device page, host page) to copy from the device before the step runs, ahead of all moves_in.
        """

    @property
    def moves_in(self) -> list[tuple[int, int]]:
        """(device page, host page) to copy to the device before the step runs."""

    @property
    def token_ids(self) -> memoryview: ...

    @property
    def positions(self) -> memoryview: ...

    @property
    def slot_mapping(self) -> memoryview: ...

    @property
    def cu_seqlens(self) -> memoryview: ...

    @property
    def context_lens(self) -> memoryview: ...

    @property
    def page_table(self) -> memoryview: ...

    @property
    def logit_rows(self) -> memoryview: ...

    @property
    def logit_target(self) -> memoryview: ...

    @property
    def temperature(self) -> memoryview: ...

    @property
    def top_p(self) -> memoryview: ...

    @property
    def min_p(self) -> memoryview: ...

    @property
    def top_k(self) -> memoryview: ...

    @property
    def seed(self) -> memoryview: ...

    @property
    def draw_position(self) -> memoryview: ...

    @property
    def num_logprobs(self) -> memoryview: ...

    @property
    def state_slot(self) -> memoryview: ...

    @property
    def adjustment(self) -> memoryview: ...

    @property
    def adjust_seq(self) -> memoryview: ...

    @property
    def adjust_row(self) -> memoryview: ...

    @property
    def count_slot(self) -> memoryview: ...

    @property
    def prompt_lens(self) -> memoryview: ...

    @property
    def repetition_penalty(self) -> memoryview: ...

    @property
    def presence_penalty(self) -> memoryview: ...

    @property
    def frequency_penalty(self) -> memoryview: ...

    @property
    def cu_biases(self) -> memoryview: ...

    @property
    def mask_row(self) -> memoryview: ...

    @property
    def bias_ids(self) -> memoryview: ...

    @property
    def bias_values(self) -> memoryview: ...

    @property
    def token_masks(self) -> memoryview: ...

def transitions() -> list[tuple[str, str, str]]:
    """
    Every legal edge of a request's life: (state, event, next state), as csrc/fsm/transitions.h has them.
    """

class Drawn:
    """
    What a committed step drew: (request_id, token, finish) in row order, without requests that have
    ended; finish is None, 'stop' or 'length'. Each iteration makes them anew.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[int, int, str | None]]: ...

class Scheduler:
    """
    Decides what runs in the next step (docs/scheduler.md). Not thread-safe: one thread owns it. Times are
    nanoseconds since any fixed start.
    """

    def __init__(self, config: SchedulerConfig, io: Sequence[memoryview] = ..., offsets: Sequence[int] = ...) -> None:
        """
        io: a writable buffer for each of max_in_flight steps, where the inputs of step i are written to number i
        modulo max_in_flight: tensor j of STEP_SIZES and INPUTS in tokenspeed/step.py at byte offsets[j]. Without
        it steps have memory of their own. Raises ValueError.
        """

    def submit(self, request_id: int, prompt: Sequence[int], params: RequestParams, now_ns: int = 0) -> None:
        """
        Queues a request. QueueFull when max_waiting wait; ValueError for one that could never be served.
        """

    def next_step(self, now_ns: int = 0) -> Step | None:
        """
        Plans a step. None: nothing can run now; commit first if a step is in flight.
        """

    def commit(self, step_id: int, tokens: memoryview) -> Drawn:
        """
        The oldest step has run; tokens is int32[num_logit_rows]. Returns what it drew.
        """

    def fail_step(self, step_id: int) -> list[int]:
        """
        The oldest step failed on the device: returns the requests that end with it.
        """

    def settle(self) -> None:
        """
        Do what can wait until the device is busy: pages that the last commit filled go to the prefix index, and those
        that the next decodes need are freed. Where nobody calls it, it is done when it is needed.
        """

    def warm(self) -> None:
        """
        Settle, and read what the next commit and next_step will read: keeps it in the processor's caches.
        """

    def abort(self, request_id: int) -> bool:
        """
        Ends a request; False if it is unknown or has ended. Its pages are free at once, or when the last step
        in flight that uses them is over. No event of it follows.
        """

    def expire(self, now_ns: int) -> list[int]:
        """Ends the requests whose deadline has come; returns them."""

    def preempt(self, request_id: int, always: bool = False) -> bool:
        """
        Has a request give its place up and wait before all new ones. False where it cannot: it has no place, a step
        in flight uses it, or, unless `always`, it has drawn nothing since the last time.
        """

    def flush_prefixes(self) -> None:
        """
        The weights have changed: nothing cached is used by requests admitted from here on.
        """

    def drop_host_tier(self) -> None:
        """The host's memory of pages is not used any more."""

    def take_events(self) -> list[tuple[object, ...]]:
        """
        What happened to cached pages since the last call, in order: ('stored', hash, parent hash or None, key,
        tokens), ('removed', hash), ('cleared',).
        """

    def requests(self) -> list[tuple[int, str, int, int, int]]:
        """
        (request_id, state, steps in flight, pages, positions) of every request, in order of id.
        """

    def counters(self) -> dict[str, int]:
        """
        Since the start: preemptions, admissions, prompt_tokens (of requests admitted for the first time), of these
        cached_tokens and restored_tokens (from the host tier), computed_tokens (planned in chunks),
        evicted_pages, expired.
        """

    def oldest_wait(self, now_ns: int) -> int:
        """
        Nanoseconds that the oldest request which never ran has waited; 0 when none waits.
        """

    @property
    def num_waiting(self) -> int:
        """Also those that were preempted."""

    @property
    def num_preempted(self) -> int:
        """Of those that wait."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_in_flight(self) -> int:
        """Steps in flight."""

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free_pages(self) -> int: ...

    @property
    def num_cached_pages(self) -> int:
        """
        Of the device, that hold a prefix and no request uses: as good as free.
        """

    @property
    def num_host_pages_used(self) -> int: ...

    @property
    def num_preemptions(self) -> int:
        """Since the start."""

    @property
    def is_idle(self) -> bool:
        """No request is known and no step is in flight."""

class StepCosts:
    """
    What a step takes in the simulator: seconds of its bucket and its attention.
    """

    def __init__(self, buckets: Sequence[tuple[bool, int, int, int, float]], per_context_token: float, per_pair: float, per_page_move: float) -> None:
        """
        buckets: (is_decode, num_tokens, num_seqs, num_logit_rows, seconds). ValueError for senseless ones.
        """

    def step_ns(self, num_tokens: int, num_seqs: int, num_logit_rows: int, decode_only: bool, context_tokens: int = 0, pairs: float = 0.0, num_page_moves: int = 0) -> tuple[int, int]:
        """
        (place of its bucket, nanoseconds) of a step. Buckets are numbered decode first, then by size.
        ValueError when none covers it.
        """

class Simulator:
    """
    Replicas that run the real scheduler in virtual time (docs/simulator.md). Times are
    nanoseconds; -1 stands for none or never.
    """

    def __init__(self, scheduler: SchedulerConfig, costs: StepCosts, *, num_replicas: int, routing: str, seed: int, load_tokens: int, block_tokens: int, waits_when_full: bool, keeps_delays: bool, interval_ns: int, num_threads: int) -> None: ...

    def add(self, timestamp_ns: int, num_input: int, num_output: int, blocks: Sequence[int], num_prompt_blocks: int, priority: int = 0, tenant: int = 0, deadline_ns: int = -1, session: int = -1, delay_ns: int = -1) -> None:
        """The next request of the trace, in order of timestamps."""

    def run(self, until_ns: int, max_rounds: int) -> bool:
        """
        Runs the rounds that end by until_ns, max_rounds at most; whatever arrives before until_ns must have been
        added. False: rounds are left.
        """

    def records(self) -> dict[str, bytes]:
        """
        What became of every request: int64 arrival, admitted, first_token, end; int32 num_input, num_output,
        num_cached, num_preemptions, tenant, replica; uint8 status (open, finished, refused, too long, expired).
        """

    def timeline(self) -> list[tuple[int, int, int, int, int]]:
        """
        (time, running, waiting, used pages, cached pages) of the whole fleet, every so often.
        """

    def totals(self) -> list[dict[str, Any]]:
        """Sums of every replica."""

    @property
    def num_added(self) -> int: ...

    @property
    def num_ended(self) -> int: ...

    @property
    def now_ns(self) -> int: ...

KERNEL_ABI: int = 5

class GraphError(Exception):
    pass

class DeviceError(Exception):
    pass

class WeightsUnknownError(DeviceError):
    pass

class RegionBuffer:
    """What a memoryview from a device's view() exports; not for direct use."""

class CpuDevice:
    """
    Regions of memory, LaunchGraphs and a fixed pool of workers that run them, one step after
    another. After seal() nothing is allocated or loaded any more. Usable from any thread.
    """

    def __init__(self, num_workers: int, pin: bool = False) -> None:
        """
        Start num_workers threads, each bound to a core if `pin`. Raises DeviceError.
        """

    def load_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        """
        Make a range of a file region weights, by mapping it if it begins at a multiple of 64 bytes. Raises
        DeviceError.
        """

    def settle(self) -> None:
        """
        Move mapped weights to memory of their own, on huge pages: faster to read, and out of reach of whatever
        happens to the file. Steps may run meanwhile, and close() ends it early. Does nothing the second time.
        """

    def update_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        """
        Replace what region weights holds, at the same addresses, by a range of a file of exactly its size:
        behind the steps in flight, before those submitted from here on. Never writes to the file that weights came
        from. Raises WeightsUnknownError when what the region holds is then unknown (it can be where memory does
        not suffice for both, and the file cannot be read to its end), any other DeviceError when it is what it was.
        """

    def allocate(self, region: str, nbytes: int) -> None:
        """Allocate region kv, arena, io or state, zeroed. Raises DeviceError."""

    def allocate_host_pages(self, num_pages: int, page_bytes: int) -> None:
        """
        Allocate the host tier: num_pages pages of host memory for pages of region kv, page_bytes each. Region kv is
        allocated before. Raises DeviceError, saying what to change when memory is short.
        """

    def move_pages(self, moves_out: Sequence[tuple[int, int]], moves_in: Sequence[tuple[int, int]]) -> None:
        """
        Copy pages before the step that is submitted next: first each (device page, host page) of moves_out from the
        device to the host, then each of moves_in from the host to the device. A list names a page once. Pages that a
        step in flight uses are not to be among them. Raises DeviceError; what the pages hold is then unknown.
        """

    def view(self, region: str) -> memoryview:
        """
        A region's bytes; writable, but for weights. It may outlive the device. Raises DeviceError.
        """

    def read(self, region: str, offset: int, nbytes: int) -> bytes:
        """
        A copy of nbytes of a region from `offset` on, made behind the steps in flight. Raises DeviceError for a range
        beyond the region's end.
        """

    def write(self, region: str, offset: int, data: object) -> None:
        """
        Copy a contiguous buffer into a region at `offset` (bytes), behind the steps in flight. Not into weights: see
        update_weights. Raises DeviceError for a range beyond the region's end.
        """

    def address(self, region: str) -> int:
        """Where a region begins. Raises DeviceError."""

    def load_graph(self, data: bytes, kv_page_stride: int) -> int:
        """
        Check a LaunchGraph and bind it to the regions; returns its handle. KV pages are kv_page_stride bytes
        apart. Raises GraphError, naming node and argument, for a graph that this device must not run.
        """

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_offset: int = 0) -> int:
        """
        Queue a step behind those in flight (8 at most) and return its ticket. Sizes must lie within the
        graph's bucket. `io_offset` (bytes, a multiple of 64) selects the step's own set of inputs and outputs.
        """

    def wait(self, ticket: int) -> None:
        """Sleep until the step of `ticket`, and all before it, are done."""

    def profile(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_offset: int = 0) -> list[tuple[str, float]]:
        """Run one step and return (node name, seconds) for each node, in order."""

    def seal(self) -> None:
        """From here on allocate, load_weights and load_graph raise DeviceError."""

    def counters(self) -> dict[str, int | float]:
        """
        What the device has done so far: steps, nodes, graphs_loaded, regions_allocated, bytes_allocated,
        bytes_settled, graphs_loaded_after_seal, allocations_after_seal, refused_after_seal, pages_moved_out,
        pages_moved_in, worker_sleeps, busy_seconds.
        """

    def close(self) -> None:
        """Finish the steps in flight and end the workers; idempotent."""

    @property
    def num_workers(self) -> int: ...

def kernel_table() -> list[tuple[str, str, int]]:
    """Every native kernel: (symbol, signature, scratch bytes per worker)."""

def measure_read_bandwidth(num_workers: int, nbytes: int) -> float:
    """Bytes per second that num_workers threads read from nbytes of memory."""

def measure_matmul(dtype: str, num_workers: int) -> float:
    """
    FLOP per second of num_workers threads with the best instruction for 'float32' or 'bfloat16'.
    """

class DeviceLostError(DeviceError):
    pass

class GpuDevice:
    """
    A GPU's memory regions, code objects and LaunchGraphs, which it runs step after step. After
    seal() nothing is allocated, loaded or instantiated any more. Usable from any thread. Every
    method raises DeviceLostError once the device is lost.
    """

    def __init__(self, backend: str, ordinal: int = 0, io_sets: int = 2, min_driver_version: int = 0, library: str = '', spin_seconds: float = 5e-05) -> None:
        """
        Open device `ordinal` of backend 'cuda' or 'hip' for `io_sets` steps in flight. `min_driver_version` is
        in the driver's own counting (12040 is CUDA 12.4); `library` is a path to use in place of the system's
        driver; wait() asks the device again and again for `spin_seconds` before it sleeps. Raises DeviceError,
        saying what to install.
        """

    def load_weights(self, path: str, file_offset: int, nbytes: int, num_threads: int = 0, piece_bytes: int = 0) -> None:
        """
        Allocate region weights and fill it with a range of a file, through pinned buffers that num_threads
        threads (0: one per usable core, 16 at most) fill with piece_bytes (0: 4 MiB) at a time. Other regions,
        code objects and graphs may be loaded meanwhile. Raises DeviceError.
        """

    def update_weights(self, path: str, file_offset: int, nbytes: int, num_threads: int = 0, piece_bytes: int = 0) -> None:
        """
        Replace what region weights holds by a range of a file of exactly its size, behind the steps in flight;
        steps submitted meanwhile are refused. The file is read whole before anything changes, then once more.
        Raises WeightsUnknownError when what the region holds is then unknown, any other DeviceError when it is what
        it was.
        """

    def allocate(self, region: str, nbytes: int) -> None:
        """
        Allocate region kv, arena or state; zeroed, but for kv. Raises DeviceError, saying what to change when
        memory is short.
        """

    def allocate_io(self, nbytes: int, step_sizes_offset: int = -1) -> None:
        """
        Allocate region io on the device, and region host_io: for each io set as many bytes of host memory, which
        graphs read and write where it lies. If step_sizes_offset is not negative, the int32[8] there are the
        step's sizes, of which submit writes the first three. Raises DeviceError.
        """

    def allocate_host_pages(self, num_pages: int, page_bytes: int) -> None:
        """
        Allocate the host tier: num_pages pages of host memory for pages of region kv, page_bytes each. Region kv is
        allocated before. Raises DeviceError, saying what to change when memory is short.
        """

    def move_pages(self, moves_out: Sequence[tuple[int, int]], moves_in: Sequence[tuple[int, int]]) -> None:
        """
        Copy pages before the step that is submitted next: first each (device page, host page) of moves_out from the
        device to the host, then each of moves_in from the host to the device. A list names a page once. Pages that a
        step in flight uses are not to be among them. Raises DeviceError; what the pages hold is then unknown.
        """

    def view(self, region: str) -> memoryview:
        """
        The host's memory of inputs and outputs (for region io: region host_io), writable: set s begins at s times
        the region's size rounded up to 4096. It may outlive the device. Raises DeviceError.
        """

    def read(self, region: str, offset: int, nbytes: int) -> bytes:
        """
        A copy of nbytes of a region from `offset` on, made behind the steps in flight. Raises DeviceError for a range
        beyond the region's end.
        """

    def write(self, region: str, offset: int, data: object) -> None:
        """
        Copy a contiguous buffer into a region at `offset` (bytes), behind the steps in flight. Not into weights: see
        update_weights. Raises DeviceError for a range beyond the region's end.
        """

    def address(self, region: str) -> int:
        """
        Where a region begins, in the device's primary context; for region host_io, where the device finds it. Raises
        DeviceError.
        """

    def load_binary(self, name: str, data: bytes) -> None:
        """
        Load a code object (cubin or hsaco), which graphs name by `name`. Several threads may do so at once.
        Raises GraphError when it is damaged or for another GPU, DeviceError.
        """

    def load_graph(self, data: bytes, kv_page_stride: int) -> int:
        """
        Check a LaunchGraph, bind it to regions and code objects, and instantiate it once for each io set;
        returns its handle. KV pages are kv_page_stride bytes apart. Raises GraphError, naming node and
        argument, DeviceError.
        """

    def load_files(self, binaries: Sequence[tuple[str, str, str, int, int]], graphs: Sequence[tuple[str, str, int, int]], kv_page_stride: int, num_threads: int) -> tuple[list[int], float, float]:
        """
        load_binary for each of (name, label, path, offset, bytes), then load_graph for each of (label, path,
        offset, bytes), read and loaded by num_threads threads. Returns the handles of the graphs in their order,
        and the seconds that binaries and graphs took. Raises the error of the first file that has one; a
        GraphError begins with its label.
        """

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int = 0) -> int:
        """
        Queue a step behind those in flight and return its ticket: a graph that reads its inputs from io set
        `io_set` and writes its outputs there. The set is the device's until wait(ticket). Raises DeviceError.
        """

    def wait(self, ticket: int, seconds: float = float('inf')) -> bool:
        """
        True when the step of `ticket`, and all before it, are done; False if they are not after `seconds`, in
        which the device is asked again and again. Raises DeviceLostError.
        """

    def time_steps(self, num_steps: int) -> None:
        """
        Time the graphs of steps on the device, the latest `num_steps` of them, which costs each a microsecond.
        Before seal(). Raises DeviceError.
        """

    def step_times(self) -> list[tuple[int, int, int, float, float | None]]:
        """
        (ticket, tokens, sequences, seconds of its graph, seconds since the graph before it ended) of the steps
        that were waited for since the last call; None for the first ever. Raises DeviceError.
        """

    def profile(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int = 0) -> list[tuple[str, float]]:
        """
        Run one step node by node and return (node name, seconds) for each, in order. Raises DeviceError.
        """

    def seal(self) -> None:
        """
        From here on allocate, allocate_io, load_weights, load_binary and load_graph raise DeviceError.
        """

    def counters(self) -> dict[str, int]:
        """
        What the device has done so far: steps, nodes, graphs_loaded, modules_loaded, graph_instantiations,
        captures, compilations, regions_allocated, bytes_allocated, pages_moved_out, pages_moved_in; since
        seal(): graphs_loaded_after_seal, modules_loaded_after_seal, graph_instantiations_after_seal,
        captures_after_seal, compilations_after_seal, allocations_after_seal, refused_after_seal.
        """

    def spans(self) -> list[tuple[str, float, float, int]]:
        """
        Where the time of the start went: (what, start, seconds, native id of the thread), starts on the clock of
        time.monotonic().
        """

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory. Raises DeviceError."""

    def close(self) -> None:
        """
        Finish the steps in flight and give everything back; idempotent. Neither raises nor hangs.
        """

    @property
    def name(self) -> str: ...

    @property
    def arch(self) -> str:
        """Such as 'sm_90' or 'gfx950'."""

    @property
    def driver_version(self) -> int: ...

class GpuContext:
    """
    A GPU's context, held open: making it takes a quarter of a second, and a GpuDevice of the
    same device then shares it. Raises DeviceError.
    """

    def __init__(self, backend: str, ordinal: int = 0, library: str = '') -> None: ...

    def close(self) -> None:
        """Let go of it; idempotent. The device closes with its last user."""

def gpu_devices(backend: str, library: str = '') -> tuple[list[tuple[int, str, str, int, int]], str]:
    """
    The GPUs of backend 'cuda' or 'hip': ([(ordinal, name, arch, total bytes, driver version)], reason why there
    are none). Starts the driver if there is one. Raises DeviceError for an unknown backend.
    """
