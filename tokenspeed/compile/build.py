"""``build``: the whole pipeline from a checkpoint to an artifact, on one screen."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from tokenspeed import __version__, _native
from tokenspeed.artifact import (
    DEVICE_ABI,
    DEVICE_LIBRARY,
    FORMAT_VERSION,
    NATIVE_LIBRARY,
    BinaryEntry,
    BucketEntry,
    CeilingEntry,
    Manifest,
    ModelSection,
    PreludeEntry,
    StepCost,
    TargetSection,
)
from tokenspeed.bucket import StepLimits
from tokenspeed.compile.capture import Captures
from tokenspeed.compile.checkpoint import Checkpoint, open_checkpoint, tensor_shapes
from tokenspeed.compile.code_cache import default_cache
from tokenspeed.compile.dummy_weights import DummyCheckpoint
from tokenspeed.compile.equivalence import prove_selection
from tokenspeed.compile.lower import Binary, LoweredTarget, TargetPlan, lower_target, plan_target
from tokenspeed.compile.models import build_program
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.program import Program
from tokenspeed.compile.promise import envelope_of, orders_of, pinned_solutions
from tokenspeed.compile.tokenizer import load_tokenizer
from tokenspeed.compile.verify import verify
from tokenspeed.compile.weights import WeightPlan, write_weights
from tokenspeed.envelope import Envelope
from tokenspeed.equivalence import FILE as EQUIVALENCE
from tokenspeed.errors import CheckpointError, UsageError
from tokenspeed.kernels.native_specs import native_registry
from tokenspeed.kernels.registry import DeviceKernel, Registry
from tokenspeed.publish import destination, publishing, seal
from tokenspeed.target import Target

if TYPE_CHECKING:
    from tokenspeed.compile.codegen import CompiledKernel


@dataclass(frozen=True)
class BuildResult:
    """What was built: where, its identity, its size in bytes, and the seconds that each stage took."""

    path: Path
    digest: str
    bytes: int
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "digest": self.digest, "bytes": self.bytes, "seconds": dict(self.seconds)}


class Progress:
    """Progress on a stream: a line per stage, and a bar (tqdm) while weights are packed; silent without a stream."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and report it when it is done."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
        if self.stream is not None:
            print(f"{name:<10} {self.seconds[name]:6.2f} s", file=self.stream, flush=True)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Any]:
        """Yield a callback that takes (bytes done, bytes in all) and moves a bar."""
        from tqdm import tqdm

        with tqdm(total=total, desc=name, unit="B", unit_scale=True, file=self.stream, leave=False,
                  disable=self.stream is None or not self.stream.isatty()) as bar:  # fmt: skip
            yield lambda done, _: bar.update(done - bar.n)


def build(
    checkpoint: str | Path,
    output: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    solutions: Mapping[str, str] | None = None,
    force: bool = False,
    dummy_weights: int | None = None,
    workers: int | None = None,
    cache: Path | Literal["default"] | None = "default",
    progress: Progress | None = None,
    **flags: Any,
) -> BuildResult:
    """Compile ``checkpoint`` into an artifact at ``output`` (default: artifacts/NAME).

    Args:
        checkpoint: a Hugging Face directory (safetensors) or a GGUF file.
        output: a directory to make, or a path ending in .tar for one file.
        recipe: a TOML file with an [envelope] table.
        solutions: kind of op -> the only solution allowed for it.
        force: replace what is at ``output``, once the new artifact is whole.
        dummy_weights: seed of random weights; ``checkpoint`` is then a directory with a config.json alone.
        workers: processes that compile GPU kernels (default: one per core).
        cache: folder that keeps compiled GPU kernels (default: ~/.cache/tokenspeed/kernels), None to compile each.
        flags: envelope fields (see ``tokenspeed.envelope.FIELDS``), e.g. dtype="float32", targets="cpu:x86-64-v3".

    Raises:
        TokenSpeedError: one of its kinds (checkpoint, envelope, selection, resources); nothing is left behind.
    """
    progress = progress or Progress()
    cache = default_cache() if cache == "default" else cache
    with progress.stage("checkpoint"):
        source = _open(checkpoint, dummy_weights)
        envelope = envelope_of(source, flags, recipe)
        solutions = pinned_solutions(envelope, solutions or {})
        tokenizer = asdict(source.tokenizer())
        _check_texts(tokenizer)
        _check_vocabulary(tokenizer["tokenizer_json"], source.config.vocab_size)
    path = Path(output) if output is not None else default_output(envelope.model)
    destination(path, force)
    with progress.stage("program"):
        program = build_program(
            source.config,
            dtype=envelope.dtype,
            max_model_len=envelope.max_model_len,
            page_size=envelope.page_size,
            penalties=envelope.penalties,
            orders=orders_of(envelope),
        )
        verify(program)
        fused = run_passes(program, CPU_PASSES)
    with progress.stage("select"):
        plans = [_plan(fused, target, envelope, solutions, cache) for target in envelope.targets]
    proofs = []
    if envelope.pinned_solution is not None:
        with progress.stage("prove"):
            proofs = [prove_selection(plan.selection) for plan in plans]
    compiled: Mapping[tuple[DeviceKernel, Target], CompiledKernel] = {}
    if any(plan.kernels for plan in plans):
        with progress.stage("compile"):
            compiled = _compile(plans, progress, workers=workers, cache=cache)
    captures: Mapping[Target, Captures] = {}
    if any(plan.captures for plan in plans):
        with progress.stage("capture"):
            captures = _capture(plans, cache)
    with progress.stage("lower"):
        lowered = [lower_target(p, _binaries(p, compiled), captures.get(p.selection.target)) for p in plans]
    with publishing(path, force=force, archive=path.suffix == ".tar") as folder:
        files = _weight_files(lowered)
        with progress.stage("weights"):
            _write_weights(folder, files, fused, source, progress)
        with progress.stage("graphs"):
            sections = tuple(_write_target(folder, t, files, _cost(fused, t), compiled) for t in lowered)
            _write_tokenizer(folder, tokenizer)
            _write_json(folder / "selection.json", {"targets": [t.selection.to_json() for t in lowered]})
            if proofs:
                _write_json(folder / EQUIVALENCE, {"targets": proofs})
            (folder / "program.json").write_text(fused.to_json())
        with progress.stage("seal"):
            model = _model_section(source, envelope)
            digest = seal(folder, Manifest(FORMAT_VERSION, __version__, model, envelope, sections))
            nbytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return BuildResult(path, digest, nbytes, progress.seconds)


def _plan(
    program: Program, target: Target, envelope: Envelope, solutions: Mapping[str, str], cache: Path | None
) -> TargetPlan:
    return plan_target(
        program,
        target,
        StepLimits(envelope.max_prefill_tokens, envelope.max_num_seqs, envelope.max_logit_rows),
        _registry(target, solutions, cache),
        split_positions=envelope.split_positions,
        features=envelope.required_features,
        op_features=envelope.op_features,
        pinned=solutions,
        solution=envelope.pinned_solution,
    )


def _registry(target: Target, solutions: Mapping[str, str], cache: Path | None) -> Registry:
    """The kernels that a target chooses from. Those of libraries are among them where an op is pinned to one: they
    are captured on a GPU of the target, which an ordinary build does without."""
    if not target.is_gpu:
        return native_registry()
    try:
        from tokenspeed.kernels.triton_specs import triton_registry  # a CPU build does without Triton
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        raise UsageError(
            f"target {target} needs Triton to compile its kernels, and it is not installed",
            hint="install it with `pip install 'tokenspeed[build]'` (Linux, x86-64)",
        ) from None
    if "flashinfer" not in solutions.values():
        return triton_registry()
    from tokenspeed.compile.capture_build import capture_problem
    from tokenspeed.kernels.flashinfer_specs import flashinfer_specs

    return Registry([*triton_registry().specs, *flashinfer_specs(capture_problem("flashinfer", target, cache))])


def _compile(
    plans: Sequence[TargetPlan], progress: Progress, *, workers: int | None, cache: Path | None
) -> Mapping[tuple[DeviceKernel, Target], CompiledKernel]:
    """Every GPU kernel of all plans, compiled side by side."""
    from tokenspeed.compile.codegen import compile_kernels

    jobs = [(kernel, plan.selection.target) for plan in plans for kernel in plan.kernels]
    return compile_kernels(jobs, workers=workers, cache=cache, progress=progress.stream)


def _capture(plans: Sequence[TargetPlan], cache: Path | None) -> Mapping[Target, Captures]:
    """What libraries launch, of all plans that let them."""
    from tokenspeed.compile.capture_build import capture_calls

    plans = [plan for plan in plans if plan.captures]
    return {p.selection.target: capture_calls(p.captures, p.selection.target, cache=cache) for p in plans}


def _binaries(
    plan: TargetPlan, compiled: Mapping[tuple[DeviceKernel, Target], CompiledKernel]
) -> dict[DeviceKernel, Binary]:  # fmt: skip
    found = {kernel: compiled[kernel, plan.selection.target] for kernel in plan.kernels}
    return {kernel: Binary(code.name, code.threads, code.shared_bytes) for kernel, code in found.items()}


def default_output(model: str) -> Path:
    """``artifacts/NAME``, where a name like ``org/model`` makes a folder, and none leads out of artifacts/."""
    parts = [part for part in model.split("/") if part.strip(".")]
    if not parts:
        raise UsageError(f"the model name {model!r} makes no path", hint="say where the artifact goes with -o")
    return Path("artifacts", *parts)


def resolve_envelope(
    checkpoint: str | Path,
    *,
    flags: Mapping[str, Any],
    recipe: str | Path | None = None,
    dummy_weights: int | None = None,
) -> Envelope:
    """The envelope that ``build`` would use."""
    return envelope_of(_open(checkpoint, dummy_weights), flags, recipe)


def _open(checkpoint: str | Path, dummy_weights: int | None) -> Checkpoint:
    return open_checkpoint(checkpoint) if dummy_weights is None else DummyCheckpoint(checkpoint, dummy_weights)


def export_onnx(
    checkpoint: str | Path, path: Path, *, max_model_len: int | None = None, progress: Progress | None = None
) -> None:
    """Write the float32 Program of ``checkpoint`` as ONNX."""
    from tokenspeed.compile.onnx_export import export_onnx as write

    progress = progress or Progress()
    with progress.stage("checkpoint"):
        source = open_checkpoint(checkpoint)
        envelope = envelope_of(source, {"dtype": "float32", "max_model_len": max_model_len}, None)
    with progress.stage("program"):
        program = build_program(
            source.config, dtype="float32", max_model_len=envelope.max_model_len, page_size=envelope.page_size
        )
    with progress.stage("onnx"):
        write(program, source.read, path)


def _weight_files(lowered: Sequence[LoweredTarget]) -> dict[WeightPlan, str]:
    """File of each distinct weight plan: targets whose kernels read the same layouts share one."""
    files: dict[WeightPlan, str] = {}
    for target in lowered:
        if target.weights not in files:
            suffix = f"-{len(files)}" if f"weights/{target.weights.name}.safetensors" in files.values() else ""
            files[target.weights] = f"weights/{target.weights.name}{suffix}.safetensors"
    return files


def _write_weights(
    folder: Path, files: Mapping[WeightPlan, str], program: Program, source: Checkpoint, progress: Progress
) -> None:
    (folder / "weights").mkdir()
    for plan, name in files.items():
        with progress.bar(name, plan.nbytes) as report, (folder / name).open("wb") as out:
            write_weights(plan, program, source, out, report)


def _write_target(
    folder: Path,
    target: LoweredTarget,
    files: Mapping[WeightPlan, str],
    cost: StepCost,
    compiled: Mapping[tuple[DeviceKernel, Target], CompiledKernel],
) -> TargetSection:
    """Write the LaunchGraphs and the GPU binaries of one target; returns what the manifest says of it."""
    graphs = folder / "graphs" / target.target.path_name
    graphs.mkdir(parents=True)
    entries = []
    for bucket, graph in target.graphs.items():
        path = graphs / f"{bucket.name}.tslg"
        path.write_bytes(graph.encode())
        entries.append(BucketEntry(bucket, path.relative_to(folder).as_posix()))
    ceilings = []
    for ceiling, graph in target.ceilings:
        path = graphs / f"ceiling-{ceiling.kind}.tslg"
        path.write_bytes(graph.encode())
        name = path.relative_to(folder).as_posix()
        ceilings.append(CeilingEntry(ceiling.kind, name, ceiling.work, ceiling.num_tokens))
    prelude = None
    if target.prelude is not None:
        path = graphs / "prelude.tslg"
        path.write_bytes(target.prelude.encode())
        prelude = PreludeEntry(path.relative_to(folder).as_posix(), target.layout.tables)
    values = graphs / "values.json"
    values.write_bytes(target.values.to_bytes())
    return TargetSection(
        target=str(target.target),
        kernel_library=DEVICE_LIBRARY if target.target.is_gpu else NATIVE_LIBRARY,
        kernel_abi=DEVICE_ABI if target.target.is_gpu else _native.KERNEL_ABI,
        weights=files[target.weights],
        weights_offset=target.weights.data_offset,
        weights_bytes=target.weights.nbytes,
        arena_bytes=target.arena_bytes,
        kv_page_bytes=target.kv_page_bytes,
        io_bytes=target.io_bytes,
        io=target.io,
        state_bytes=target.state_bytes,
        state=target.state,
        binaries=_write_binaries(folder, target, compiled),
        buckets=tuple(entries),
        cost=cost,
        values=values.relative_to(folder).as_posix(),
        ceilings=tuple(ceilings),
        prelude=prelude,
    )


def _write_binaries(
    folder: Path, target: LoweredTarget, compiled: Mapping[tuple[DeviceKernel, Target], CompiledKernel]
) -> tuple[BinaryEntry, ...]:
    if not target.kernels and not target.captured:
        return ()
    kernels = folder / "kernels" / target.target.path_name
    kernels.mkdir(parents=True)
    binaries = {name: compiled[kernel, target.target].binary for name, kernel in target.kernels.items()}
    entries = []
    for name, binary in sorted({**binaries, **target.captured}.items()):
        path = kernels / f"{name}.{target.target.gpu.binary_suffix}"
        path.write_bytes(binary)
        entries.append(BinaryEntry(name, path.relative_to(folder).as_posix()))
    return tuple(entries)


def _cost(program: Program, target: LoweredTarget) -> StepCost:
    """Weights that a step reads whole (all but rows looked up in a table), and multiply-adds of the projections."""
    looked_up = {op.operand("table") for op in program.ops if op.kind == "embedding"}
    projections = [op for op in program.ops if op.kind.startswith("linear")]
    whole = {name for op in projections for name in op.inputs} | {
        w.name for w in program.op_weights if w.name not in looked_up and not w.name.startswith("rope_")
    }
    nbytes = sum(t.nbytes for (name, _), t in target.weights.tensors().items() if name in whole)
    flops = {"num_tokens": 0, "num_logit_rows": 0}
    for op in projections:
        features_out, features_in = program.values[op.operand("weight")].shape
        assert isinstance(features_out, int) and isinstance(features_in, int)
        flops[str(program.values[op.operand("x")].shape[0])] += 2 * features_out * features_in
    return StepCost(nbytes, flops["num_tokens"], flops["num_logit_rows"])


def _check_texts(tokenizer: Mapping[str, Any]) -> None:
    """JSON escapes can hold what no UTF-8 file can."""
    for name, value in tokenizer.items():
        try:
            value.encode() if isinstance(value, str) else None
        except UnicodeEncodeError:
            raise CheckpointError(f"the tokenizer's {name} holds half of a surrogate pair: {value!r:.60}") from None


def _check_vocabulary(tokenizer_json: bytes, vocab_size: int) -> None:
    """Every token needs a row of the embedding; rows without a token are common and do no harm."""
    ids = load_tokenizer(tokenizer_json, "tokenizer.json").get_vocab(with_added_tokens=True)
    beyond = [token for token, number in ids.items() if number >= vocab_size]
    if beyond:
        raise CheckpointError(
            f"the tokenizer does not fit the model: need token ids below {vocab_size}, the rows of the embedding, have"
            f" {len(beyond)} others, the last of them {max(ids.values())} ({max(ids, key=ids.__getitem__)!r:.60})",
            hint="use the tokenizer that belongs to these weights, or drop the tokens that were added to it",
        )


def _write_tokenizer(folder: Path, files: dict[str, Any]) -> None:
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(files.pop("tokenizer_json"))
    _write_json(folder / "tokenizer" / "config.json", files)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _model_section(source: Checkpoint, envelope: Envelope) -> ModelSection:
    config, digests = source.config, source.digests()
    shapes = tensor_shapes(config).values()
    combined = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    return ModelSection(
        name=envelope.model,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_parameters=sum(_product(shape) for shape in shapes),
        checkpoint_kind="gguf" if any(name.endswith(".gguf") for name in digests) else "huggingface",
        checkpoint_sha256=combined,
    )


def _product(shape: Sequence[int]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
