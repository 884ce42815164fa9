"""A tiny Llama lowered for one target, in memory, and a device of bytes to run its graphs on."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from tiny_llama import tiny_config, tiny_program, tiny_weights

from tokenspeed.bucket import BucketTable, StepLimits
from tokenspeed.compile.checkpoint import ModelConfig
from tokenspeed.compile.interpret import step_counts
from tokenspeed.compile.interpret_graph import GraphInterpreter, Memory
from tokenspeed.compile.lower import LoweredTarget, lower_program
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.program import Program
from tokenspeed.compile.weights import write_weights
from tokenspeed.graph import Region
from tokenspeed.kernels.native_specs import native_registry
from tokenspeed.step import INPUTS, OUTPUTS
from tokenspeed.target import Target

LIMITS = StepLimits(max_prefill_tokens=80, max_num_seqs=6, max_logit_rows=44)
REGISTRY = native_registry()


class DictSource:
    """Tensors by name, as packing reads them from a checkpoint."""

    def __init__(self, tensors: dict[str, Any]):
        self.tensors = tensors

    def read(self, name: str) -> Any:
        return self.tensors[name]


def fused_program(config: ModelConfig | None = None, dtype: str = "float32") -> Program:
    return run_passes(tiny_program(config or tiny_config(), dtype), CPU_PASSES)


def lowered(program: Program, target: str = "cpu:x86-64-v4", **changes: Any) -> LoweredTarget:
    """Lowered with LIMITS and a split inside the longest sequence, unless ``changes`` say otherwise."""
    options: dict[str, Any] = {"limits": LIMITS, "registry": REGISTRY, "split_positions": 64, **changes}
    return lower_program(program, Target.parse(target), **options)


class ByteDevice:
    """What a device is to a graph: regions of bytes. Everything but the weights starts as NaN."""

    def __init__(self, program: Program, low: LoweredTarget, config: ModelConfig, num_pages: int):
        self.low = low
        self.memory = Memory(low.layout.region_sizes, low.kv_page_bytes, num_pages, fill=0xFF)
        file = io.BytesIO()
        write_weights(low.weights, program, DictSource(tiny_weights(config)), file)
        data = file.getvalue()[low.weights.data_offset :]
        self.memory.regions[Region.WEIGHTS][:] = np.frombuffer(data, np.uint8)
        self.placed = {tensor.name: tensor for tensor in low.io}
        self.table = BucketTable(low.graphs)
        self.run_prelude()

    def run_prelude(self) -> None:
        """What runs once, before the first step."""
        if self.low.prelude is not None:
            GraphInterpreter(REGISTRY, self.memory).run(self.low.prelude, 0, 0, 0)

    def counts(self, inputs: dict[str, Any]) -> Any:
        """token_counts of the slots that the step of ``inputs`` counts."""
        placed = next(tensor for tensor in self.low.state if tensor.name == "token_counts")
        return self.memory.read(Region.STATE, placed, placed.shape[0])[counted_slots(inputs)]

    def run(self, inputs: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
        """Run one step on its bucket's graph; with ``seed`` in a random order that respects the edges."""
        sizes = (len(inputs["token_ids"]), len(inputs["context_lens"]), len(inputs["logit_rows"]))
        bucket = self.table.find(*sizes, decode_only=len(set(sizes)) == 1)
        assert bucket is not None
        for tensor in INPUTS:
            self.memory.write(Region.IO, self.placed[tensor.name], inputs[tensor.name])
        self.memory.write(Region.IO, self.placed["step_sizes"], step_sizes(inputs))
        graph = self.low.graphs[bucket]
        order = None if seed is None else random_order([node.predecessors for node in graph.nodes], seed)
        GraphInterpreter(REGISTRY, self.memory).run(graph, *sizes, order=order)
        return {t.name: self.memory.read(Region.IO, self.placed[t.name], sizes[2]) for t in OUTPUTS}


def counted_slots(inputs: dict[str, Any]) -> Any:
    """Slots whose tokens the step of ``inputs`` counts."""
    return inputs["count_slot"][inputs["count_slot"] >= 0]


def step_sizes(inputs: dict[str, Any]) -> Any:
    """What a step of ``inputs`` has in step_sizes."""
    return np.array([*step_counts(inputs), 0, 0], np.int32)


def random_order(predecessors: list[tuple[int, ...]], seed: int) -> list[int]:
    """A random topological order."""
    rng = np.random.default_rng(seed)
    waiting = set(range(len(predecessors)))
    order: list[int] = []
    done: set[int] = set()
    while waiting:
        ready = sorted(node for node in waiting if done.issuperset(predecessors[node]))
        node = int(rng.choice(ready))
        waiting.discard(node)
        done.add(node)
        order.append(node)
    return order
