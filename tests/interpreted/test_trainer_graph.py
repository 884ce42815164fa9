"""A GPU's graph cut and relocated for a trainer, run by the Triton interpreter beside the graph that it is made of."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from lowered import fused_program
from test_gpu_graph import CONFIG, NUM_PAGES, GpuDevice, lowered
from tiny_llama import tiny_config, tiny_tokens

from tokenspeed.bucket import BucketKind
from tokenspeed.compile.interpret import Chunk, step_inputs
from tokenspeed.compile.interpret_triton import run_gpu_graph
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.trainer.graphs import KeptValue, StepParts, split_step
from tokenspeed.trainer.reverse import saved_values


class TrainerGpu(GpuDevice):
    """Runs the parts of the largest graph, over an arena that holds what is kept."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        values = self.low.values
        self.bucket = max((b for b in self.low.graphs if b.kind is BucketKind.MIXED), key=lambda b: b.num_tokens)
        graph = self.low.graphs[self.bucket]
        self.parts: StepParts = split_step(
            graph, values, self.bucket, self.low.arena_bytes, saved_values(values.ops)
        )  # fmt: skip
        self.memory.regions[Region.ARENA] = np.full(self.parts.arena_bytes, 0xFF, np.uint8)

    def run_part(self, graph: LaunchGraph, inputs: dict[str, Any]) -> Any:
        for name, array in inputs.items():
            if name in self.placed:
                self.memory.write(Region.HOST_IO, self.placed[name], array)
        sizes = (len(inputs["token_ids"]), len(inputs["context_lens"]), len(inputs["logit_rows"]))
        run_gpu_graph(graph, self.low.kernels, self.memory, self.placed["step_sizes"], sizes)
        return self.memory.read(Region.HOST_IO, self.placed["out_logprob"], sizes[2])

    def kept(self, value: KeptValue, rows: int) -> bytes:
        row_bytes = value.nbytes // (-(-value.rows // 32) * 32)
        return self.memory.regions[Region.ARENA][value.offset : value.offset + rows * row_bytes].tobytes()


def rows_of(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    """``inputs`` with some of their logit rows."""
    count = len(inputs["logit_rows"])
    per_row = {"logit_rows", "logit_target", "temperature", "top_p", "min_p", "top_k", "seed", "draw_position",
               "num_logprobs", "state_slot", "adjustment"}  # fmt: skip
    assert all(len(inputs[name]) == count for name in per_row)
    return {name: array[rows] if name in per_row else array for name, array in inputs.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_and_tail_give_the_bits_of_the_whole_graph(dtype: str) -> None:
    """Of rows in any groups; and what is kept stays where it was left."""
    config = tiny_config(**CONFIG)
    program = fused_program(config, dtype)
    low = lowered(program, "cuda:sm_90a")
    whole, device = GpuDevice(program, low, config, NUM_PAGES), TrainerGpu(program, low, config, NUM_PAGES)
    sizes = {**low.layout.region_sizes, Region.ARENA: device.parts.arena_bytes}
    for graph in (device.parts.head, device.parts.tail):
        verify_graph(graph, sizes, low.kv_page_bytes)
    chunks = [Chunk(tiny_tokens(30), 0, [3], scored=True), Chunk(tiny_tokens(9, seed=4), 0, [1], slot=1, scored=True)]
    inputs = step_inputs(program, chunks)
    expected = whole.run(inputs)["out_logprob"]
    device.run_part(device.parts.head, rows_of(inputs, slice(0, 0)))
    of_head = {v.name: v for v in device.parts.kept.values() if v.rows == device.bucket.num_tokens}
    before = {name: device.kept(value, 39) for name, value in of_head.items()}
    groups = [slice(20, 39), slice(0, 7), slice(7, 20)]
    have = {group.start: device.run_part(device.parts.tail, rows_of(inputs, group)) for group in groups}
    np.testing.assert_array_equal(np.concatenate([have[start] for start in sorted(have)]), expected)
    assert len(of_head) > 10 and {name: device.kept(value, 39) for name, value in of_head.items()} == before
    floats = [np.frombuffer(data, np.float32) for name, data in before.items() if of_head[name].dtype == "float32"]
    assert all(np.isfinite(values).all() for values in floats), "a kept value that nobody wrote"


def test_every_kept_value_has_bytes_of_its_own() -> None:
    config = tiny_config(**CONFIG)
    program = fused_program(config, "bfloat16")
    device = TrainerGpu(program, lowered(program, "cuda:sm_90a"), config, NUM_PAGES)
    spans = sorted((v.offset, v.offset + v.nbytes) for v in device.parts.kept.values())
    assert spans[0][0] >= device.low.arena_bytes and spans[-1][1] <= device.parts.arena_bytes
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    nodes = [node.name for part in (device.parts.head, device.parts.tail) for node in part.nodes]
    assert sorted(nodes) == sorted([*(n.name for n in device.low.graphs[device.bucket].nodes), "inputs"])
