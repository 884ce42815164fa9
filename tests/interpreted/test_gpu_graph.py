"""The GPU LaunchGraphs of a tiny Llama, run node by node through the Triton interpreter, against the Program.

What the Program interpreter computes from values and shapes, these compute from bytes: kernels, layouts, lowering
and the memory plan must all be right. Memory starts as 0xff, so every float that nobody wrote is a NaN, and each
node may touch only what its pointers promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lowered import LIMITS, ByteDevice, counted_slots, fused_program, random_order
from test_interpret_graph import PAGES, adjusted_steps, mixed_steps
from tiny_llama import tiny_config, tiny_tokens, tiny_weights

from tokenspeed.compile.interpret import Chunk, Interpreter, step_counts, step_inputs
from tokenspeed.compile.interpret_triton import run_gpu_graph
from tokenspeed.compile.lower import Binary, LoweredTarget, lower_program
from tokenspeed.compile.program import Program
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Pointer, Region
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.step import INPUTS, OUTPUTS
from tokenspeed.target import Target

NUM_PAGES = 8
CONFIG = {"hidden_size": 64, "intermediate_size": 80}


def uncompiled(kernels: Sequence[DeviceKernel]) -> dict[DeviceKernel, Binary]:
    """Binaries by name only: the interpreter runs their source."""
    return {kernel: Binary(f"kernel-{i}", 32 * kernel.num_warps, 0) for i, kernel in enumerate(kernels)}


def lowered(program: Program, target: str, split_positions: int = 64) -> LoweredTarget:
    return lower_program(
        program, Target.parse(target), LIMITS, triton_registry(), split_positions=split_positions,
        compile_kernels=uncompiled,
    )  # fmt: skip


class GpuDevice(ByteDevice):
    """Regions of bytes, as a GPU would see them; kernels run through the Triton interpreter."""

    def run_prelude(self) -> None:
        if self.low.prelude is not None:
            run_gpu_graph(self.low.prelude, self.low.kernels, self.memory, self.placed["step_sizes"], ())

    def run(self, inputs: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
        """Run one step; with ``seed`` nodes come in a random order that respects the edges, and programs too."""
        sizes = (len(inputs["token_ids"]), len(inputs["context_lens"]), len(inputs["logit_rows"]))
        bucket = self.table.find(*sizes, decode_only=len(set(sizes)) == 1)
        assert bucket is not None
        for region in (Region.IO, Region.HOST_IO):
            self.memory.regions[region][:] = 0xFF
        for tensor in INPUTS:
            if tensor.name in inputs:
                self.memory.write(Region.HOST_IO, self.placed[tensor.name], inputs[tensor.name])
        graph = self.low.graphs[bucket]
        order = None if seed is None else random_order([node.predecessors for node in graph.nodes], seed)
        run_gpu_graph(
            graph, self.low.kernels, self.memory, self.placed["step_sizes"], step_counts(inputs), order=order, seed=seed
        )  # fmt: skip
        self.check_rows_beyond(sizes[2])
        return {t.name: self.memory.read(Region.HOST_IO, self.placed[t.name], sizes[2]) for t in OUTPUTS}

    def check_rows_beyond(self, num_logit_rows: int) -> None:
        """Rows that the step does not have are as they were."""
        for tensor in OUTPUTS:
            placed = self.placed[tensor.name]
            rest = self.memory.read(Region.HOST_IO, placed, placed.shape[0])[num_logit_rows:]
            assert (rest.view(np.uint8) == 0xFF).all(), f"{tensor.name} has rows beyond {num_logit_rows}"

    def page(self, number: int) -> Any:
        size = self.low.kv_page_bytes
        return self.memory.regions[Region.KV][number * size : (number + 1) * size]


def agree(have: dict[str, Any], expected: dict[str, Any], tolerance: float, exact: bool) -> None:
    np.testing.assert_array_equal(have["out_token"], expected["out_token"])
    np.testing.assert_allclose(have["out_logprob"], expected["out_logprob"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(have["out_top_logprobs"], expected["out_top_logprobs"], rtol=0, atol=tolerance)
    if exact:
        np.testing.assert_array_equal(have["out_rank"], expected["out_rank"])
        np.testing.assert_array_equal(have["out_top_ids"], expected["out_top_ids"])


@pytest.mark.parametrize(
    ("target", "dtype", "changes"),
    [
        ("cuda:sm_90a", "float32", {}),
        ("cuda:sm_90a", "bfloat16", {}),
        ("cuda:sm_90a", "float32", {"tie_word_embeddings": False, "num_kv_heads": 4, "num_layers": 1}),
        ("hip:gfx942", "bfloat16", {"num_layers": 1}),
    ],
    ids=["hopper-float32", "hopper-bfloat16", "hopper-float32-untied", "gfx942-bfloat16"],
)
def test_mixed_steps_agree_with_the_program_interpreter(target: str, dtype: str, changes: dict[str, Any]) -> None:
    config = tiny_config(**CONFIG, **changes)
    program = fused_program(config, dtype)
    interpreter = Interpreter(program, tiny_weights(config).__getitem__, num_pages=NUM_PAGES, num_slots=6)
    device = GpuDevice(program, lowered(program, target), config, NUM_PAGES)
    weights = device.memory.regions[Region.WEIGHTS].copy()
    for chunks in (*mixed_steps(), *adjusted_steps()):
        inputs = step_inputs(program, chunks)
        expected, have = interpreter.run(inputs), device.run(inputs)
        np.testing.assert_array_equal(device.counts(inputs), interpreter.state["token_counts"][counted_slots(inputs)])
        agree(have, expected, 2e-5 if dtype == "float32" else 2e-2, exact=dtype == "float32")
    assert (device.memory.regions[Region.WEIGHTS] == weights).all()
    unused = set(range(NUM_PAGES)) - {page for pages in PAGES for page in pages}
    assert unused and all((device.page(number) == 0xFF).all() for number in unused)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "hip:gfx942"])
def test_inputs_come_first_and_outputs_go_to_the_host(target: str) -> None:
    low = lowered(fused_program(tiny_config(**CONFIG, num_layers=1), "bfloat16"), target)
    first_output = min(tensor.offset for tensor in low.io if tensor.name in {t.name for t in OUTPUTS})
    for graph in low.graphs.values():
        inputs, *others = graph.nodes
        assert (inputs.name, inputs.symbol, inputs.predecessors) == ("inputs", "stage_io", ())
        for index, node in enumerate(others, 1):
            host = [p for _, p in node.pointers() if p.region is Region.HOST_IO]
            assert all(p.access is Access.WRITE and p.offset >= first_output for p in host), "a read over the bus"
            assert not any(p.writes for _, p in node.pointers() if p.region is Region.IO)
            assert len(host) == (len(OUTPUTS) if node is graph.nodes[-1] else 0)
            assert node.launch is not None and node.predecessors
            if node.predecessors == (0,):
                assert not node.launch.programmatic, f"node {index} may read inputs that are still on their way"
        assert any(node.launch is not None and node.launch.programmatic for node in others) is target.startswith("cuda")


def test_any_order_of_nodes_and_programs_gives_the_same_bits() -> None:
    config = tiny_config(**CONFIG, num_layers=1)
    program = fused_program(config, "bfloat16")
    low = lowered(program, "cuda:sm_90a")
    one, other = (GpuDevice(program, low, config, NUM_PAGES) for _ in range(2))
    for seed, chunks in enumerate((*mixed_steps()[:4], *adjusted_steps()[:3])):
        inputs = step_inputs(program, chunks)
        expected, have = one.run(inputs), other.run(inputs, seed + 1)
        for name in expected:
            np.testing.assert_array_equal(have[name], expected[name])


def test_a_row_has_the_same_bits_alone_and_beside_others_in_any_bucket() -> None:
    """Every kernel promises it (batch_invariant): here of one sequence by prefill and decode, whole and in parts."""
    config = tiny_config(**CONFIG, num_layers=1)
    program = fused_program(config, "bfloat16")
    low = lowered(program, "cuda:sm_90a")
    tokens = tiny_tokens(70, seed=9)
    scored: dict[str, Any] = {"scored": True, "slot": 0, "num_logprobs": 2}
    beside = [Chunk(tiny_tokens(40, seed=5), 0, [4, 2], slot=1), Chunk(tiny_tokens(7, seed=6), 0, [5], slot=2)]

    def logprobs(steps: Sequence[Sequence[Chunk]]) -> Any:
        device, rows = GpuDevice(program, low, config, NUM_PAGES), []
        for chunks in steps:
            have = device.run(step_inputs(program, chunks))
            own = sum(len(chunk.token_ids) for chunk in chunks if chunk.pages == PAGES[0])
            rows.append(have["out_logprob"][:own])
        return np.concatenate(rows)

    def part(start: int, stop: int) -> Chunk:
        return Chunk(tokens[start:stop], start, PAGES[0], **scored)

    whole = logprobs([[part(0, 40)], [part(40, 70)]])
    parts = logprobs([[part(0, 33), beside[1]], [part(33, 34)], [part(34, 41), *beside], [part(41, 70)]])
    last_of_part = [32, 33, 39, 40, 69]  # their rows draw instead of scoring the next token
    kept = [i for i in range(70) if i not in last_of_part]
    np.testing.assert_array_equal(parts.view(np.uint32)[kept], whole.view(np.uint32)[kept])


def test_a_node_that_reaches_beyond_its_pointers_is_refused() -> None:
    config = tiny_config(**CONFIG, num_layers=1)
    program = fused_program(config)
    low = lowered(program, "cuda:sm_90a")
    device = GpuDevice(program, low, config, NUM_PAGES)
    inputs = step_inputs(program, [Chunk(tiny_tokens(9), 0, [0])])
    bucket = device.table.find(9, 1, 1, decode_only=False)
    assert bucket is not None
    for tensor in INPUTS:
        if tensor.name in inputs:
            device.memory.write(Region.HOST_IO, device.placed[tensor.name], inputs[tensor.name])
    graph, sizes = low.graphs[bucket], device.placed["step_sizes"]
    inputs_node, first = graph.nodes[:2]
    run_gpu_graph(replace(graph, nodes=(inputs_node,)), low.kernels, device.memory, sizes, (9, 1, 1))
    first = replace(first, predecessors=())
    at, out = next((i, a) for i, a in enumerate(first.args) if isinstance(a, Pointer) and a.writes)
    args = (*first.args[:at], replace(out, extent=8 * 4 * 64), *first.args[at + 1 :])
    with pytest.raises(ProgramError, match=r"node 'embedding': .*need to write inside its arguments, have"):
        run_gpu_graph(replace(graph, nodes=(replace(first, args=args),)), low.kernels, device.memory, sizes, (9, 1, 1))
    with pytest.raises(ProgramError, match=r"need its predecessors to have run"):
        run_gpu_graph(graph, low.kernels, device.memory, sizes, (9, 1, 1), order=[1])
    with pytest.raises(ProgramError, match=r"need a binary of this kernel, have <"):
        run_gpu_graph(graph, {}, device.memory, sizes, (9, 1, 1))
    short = replace(first, args=first.args[:-1])
    with pytest.raises(ProgramError, match=r"arguments for embedding\[.*the last ones null"):
        run_gpu_graph(replace(graph, nodes=(short,)), low.kernels, device.memory, sizes, (9, 1, 1))
