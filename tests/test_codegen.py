"""Kernels compile for every target with no GPU, to the same bytes every time, and only once."""

from __future__ import annotations

import importlib.metadata
import io
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_kernels import JOBS, TARGETS, broken_kernel, compiled, product_kernel, scale_kernel

from tokenspeed.compile import codegen
from tokenspeed.compile.code_cache import CodeCache, default_cache
from tokenspeed.compile.codegen import SCRATCH_POINTERS, compile_kernels
from tokenspeed.errors import ArtifactError, ResourceError, TargetError, UsageError
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.target import Target

HOPPER, GFX942 = Target("cuda", "sm_90a"), Target("hip", "gfx942")
MODULE = """
import triton
import triton.language as tl
STEP = {step}

@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * {value}, mask=at < n)
"""


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, compiling anything fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(codegen, "_Worker", refuse)


def write_module(folder: Path, name: str, *, step: int = 1, value: str = "factor") -> DeviceKernel:
    (folder / f"{name}.py").write_text(MODULE.format(step=step, value=value))
    return scale_kernel(module=name)


# ---- what comes out -------------------------------------------------------------------------------------------


def test_every_target_compiles_without_a_gpu() -> None:
    for (kernel, target), code in compiled().items():
        assert code.target == target and code.symbol == kernel.function and code.file_name.startswith(code.symbol)
        assert code.threads == kernel.num_warps * target.gpu.warp_size <= code.info.max_threads
        assert len(code.info.params) == len(kernel.signature) + SCRATCH_POINTERS
        assert code.info.static_shared_bytes + code.shared_bytes <= target.gpu.max_shared_bytes
    assert all(compiled()[product_kernel(), target].shared_bytes > 0 for target in TARGETS)
    assert list(compiled()) == list(JOBS)


def test_names_come_from_contents() -> None:
    names = [code.name for code in compiled().values()]
    assert len(set(names)) == len(names)
    again = compile_kernels([(scale_kernel(), HOPPER), (scale_kernel(), HOPPER)], workers=1)
    assert [code.name for code in again.values()] == [compiled()[scale_kernel(), HOPPER].name]


def test_bytes_depend_on_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes, order, folders, environment: the same bytes for all six targets."""
    jobs = list(JOBS)
    random.Random(7).shuffle(jobs)
    folder = tmp_path / "a-much-longer-name-of-a-folder-for-temporary-files"
    folder.mkdir()
    for name, value in {
        "TMPDIR": str(folder), "HOME": str(folder), "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1", "DISABLE_PTXAS_OPT": "1", "AMDGCN_USE_BUFFER_OPS": "0",
        "DISABLE_LLVM_OPT": "1", "TRITON_OVERRIDE_ARCH": "sm80", "PYTHONHASHSEED": "3",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.chdir(folder)
    again = compile_kernels(jobs, workers=2, cache=tmp_path / "cache")
    for job, code in compiled().items():
        assert again[job] == code, job[1]
    assert os.listdir(folder) == []


def test_binaries_hold_no_paths() -> None:
    for code in compiled().values():
        for text in (b"/tmp", b".py", b".ptx", b"tiny_kernels", sys.prefix.encode(), str(Path.cwd()).encode()):
            assert text not in code.binary, (code.file_name, text)


# ---- the cache ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_workers")
def test_nothing_is_compiled_without_jobs(tmp_path: Path) -> None:
    assert compile_kernels([], cache=tmp_path) == {}


def test_a_second_build_compiles_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    jobs = [(scale_kernel(), HOPPER), (scale_kernel(), GFX942)]
    first = compile_kernels(jobs, workers=1, cache=tmp_path)
    request.getfixturevalue("no_workers")
    assert compile_kernels(reversed(jobs), cache=tmp_path) == first
    with pytest.raises(AssertionError, match="a worker was started"):
        compile_kernels([(scale_kernel(128), HOPPER)], cache=tmp_path)
    with pytest.raises(AssertionError, match="a worker was started"):
        compile_kernels(jobs, cache=None)


def test_damaged_entries_are_compiled_again(tmp_path: Path) -> None:
    job = (scale_kernel(), HOPPER)
    expected = compile_kernels([job], workers=1, cache=tmp_path)
    paths = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert len(paths) == 2  # source key -> content key -> content
    whole = {path: path.read_bytes() for path in paths}
    for path in paths:
        data = bytearray(whole[path])
        data[-1] ^= 1
        path.write_bytes(data)
        assert compile_kernels([job], workers=1, cache=tmp_path) == expected
        assert path.read_bytes() == whole[path]


FACTS = b'{"symbol": "scale", "threads": 128, "shared_bytes": 0}\n'


@pytest.mark.parametrize(
    ("facts", "code", "reason"),
    [
        (b"", b"", "Expecting value"),
        (b"\xff", b"", "codec can't decode"),
        (b"{}\n", b"", "'symbol'"),
        (b"[]\n", b"", "indices must be integers"),
        (FACTS, b"no code", "need a 64-bit little-endian ELF file"),
        (FACTS, GFX942, "it is for hip:gfx942"),
        (FACTS.replace(b"scale", b"other"), HOPPER, "'other'"),
    ],
)
def test_entries_that_someone_else_wrote(facts: bytes, code: bytes | Target, reason: str, tmp_path: Path) -> None:
    """Their own digests are right. A wrong way to a kernel is found again; a wrong kernel is refused."""
    content = facts + (code if isinstance(code, bytes) else compiled()[scale_kernel(), code].binary)
    job, cache = (scale_kernel(), HOPPER), CodeCache(tmp_path)
    expected = compile_kernels([job], workers=1, cache=tmp_path)
    keys = [path.parent.name + path.name for path in tmp_path.rglob("*") if path.is_file()]
    (kernel_key,) = (key for key in keys if len(cache.read(key) or b"") > 64)
    (source_key,) = {*keys} - {kernel_key}
    cache.write(source_key, content)
    assert compile_kernels([job], workers=1, cache=tmp_path) == expected
    cache.write(kernel_key, content)
    with pytest.raises(ArtifactError, match="what is cached for it is no such kernel: ") as e:
        compile_kernels([job], workers=1, cache=tmp_path)
    assert reason in e.value.message and e.value.hint is not None and "--no-cache" in e.value.hint


def test_a_full_disk_is_no_kernels_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import errno, os\nraise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
    (tmp_path / "hungry_kernels.py").write_text(text)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failures: dict[codegen.Job, TargetError] = {}
    with pytest.raises(ResourceError) as e:
        compile_kernels([(scale_kernel(module="hungry_kernels"), HOPPER)], failures=failures)
    assert e.value.message == f"the disk is full in {tmp_path}, where kernels are compiled"
    assert e.value.hint == "free some space there, or set TMPDIR to another folder"
    assert not failures


def test_an_edit_elsewhere_in_a_file_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files changed, so a worker looks; the function did not, so it finds what it has."""
    monkeypatch.syspath_prepend(tmp_path)
    cache = tmp_path / "cache"
    kernel = write_module(tmp_path, "edited_kernels")
    first = compile_kernels([(kernel, HOPPER)], workers=1, cache=cache)
    kept = {path for path in cache.rglob("*") if path.is_file()}
    write_module(tmp_path, "edited_kernels", step=2)
    assert compile_kernels([(kernel, HOPPER)], workers=1, cache=cache) == first
    (added,) = {path for path in cache.rglob("*") if path.is_file()} - kept
    assert len(added.read_bytes()) < 200  # a key, no code
    write_module(tmp_path, "edited_kernels", value="(factor + 1)")
    assert compile_kernels([(kernel, HOPPER)], workers=1, cache=cache) != first
    assert len({path for path in cache.rglob("*") if path.is_file()}) == len(kept) + 3


def test_an_edit_while_the_compiler_runs_is_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kernel = write_module(tmp_path, "raced_kernels")
    whole = codegen._compile

    def edited(*args: Any) -> Iterator[Any]:
        write_module(tmp_path, "raced_kernels", value="(factor + 1)")
        yield from whole(*args)

    with monkeypatch.context() as during:
        during.setattr(codegen, "_compile", edited)
        other = compile_kernels([(kernel, HOPPER)], workers=1, cache=tmp_path / "cache")
    write_module(tmp_path, "raced_kernels")
    assert compile_kernels([(kernel, HOPPER)], workers=1, cache=tmp_path / "cache") != other


def test_the_source_key_covers_what_a_module_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "kernel_package"
    (package / "parts").mkdir(parents=True)
    texts = {
        "__init__.py": "",
        "family.py": "import json\nfrom kernel_package.parts import first\nimport kernel_package.parts.second\n",
        "parts/__init__.py": "", "parts/first.py": "", "parts/second.py": "def f():\n    from .. import third\n",
        "third.py": "", "unrelated.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (package / name).write_text(text)

    def key() -> str:
        return codegen._SourceKeys("3.6.0").key((scale_kernel(module="kernel_package.family"), HOPPER))

    seen = {key()}
    for name in ("family.py", "parts/__init__.py", "parts/first.py", "parts/second.py", "third.py"):
        (package / name).write_text(texts[name] + "# changed\n")
        assert key() not in seen, name
        seen.add(key())
    (package / "unrelated.py").write_text("# changed\n")
    assert key() in seen
    assert codegen._SourceKeys("3.6.1").key((scale_kernel(module="kernel_package.family"), HOPPER)) not in seen


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    job = (scale_kernel(), HOPPER)
    assert compile_kernels([job], workers=1, cache=blocked / "cache")[job] == compiled()[job]


def test_entries_are_whole_or_none(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path)
    keys = [f"{i:064x}" for i in range(3)]
    assert cache.read(keys[0]) is None
    cache.write(keys[0], b"first")
    assert cache.read(keys[0]) == b"first"
    whole = cache.path(keys[0]).read_bytes()
    for size in range(len(whole)):
        cache.path(keys[0]).write_bytes(whole[:size])
        assert cache.read(keys[0]) is None
    cache.path(keys[1]).write_bytes(whole)  # under another name
    assert cache.read(keys[1]) is None
    cache.write(keys[0], b"second")
    assert cache.read(keys[0]) == b"second"
    assert not list(tmp_path.rglob(".new-*"))


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path)
    keys = [f"{i:064x}" for i in range(4)]
    for age, key in enumerate(keys):
        cache.write(key, bytes(1000))
        os.utime(cache.path(key), (1000 - age, 1000 - age))
    cache.prune(max_bytes=2500)
    assert [cache.read(key) is not None for key in keys] == [True, True, False, False]


def test_the_cache_is_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tokenspeed" / "kernels"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache() == Path.home() / ".cache" / "tokenspeed" / "kernels"


# ---- errors ---------------------------------------------------------------------------------------------------


def test_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError) as e:
        compile_kernels([(scale_kernel(), HOPPER)])
    assert e.value.message == "GPU targets need the compiler Triton 3.6, and it is not installed"
    assert e.value.hint == "install it with `pip install 'triton==3.6.*'`, or `pip install 'tokenspeed[build]'`"


def test_another_release_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.60.0")
    with pytest.raises(UsageError, match=r"need the compiler Triton 3\.6, have 3\.60\.0"):
        compile_kernels([(scale_kernel(), HOPPER)])


def test_a_kernel_that_does_not_compile_is_named() -> None:
    jobs = [(broken_kernel(), GFX942), (scale_kernel(), HOPPER), (broken_kernel(), HOPPER)]
    with pytest.raises(TargetError) as e:
        compile_kernels(jobs, workers=2)
    first, *rest = e.value.message.splitlines()
    assert first == "kernel broken[BLOCK=2; 4 warps, 1 stages] of tiny_kernels does not compile for hip:gfx942:"
    assert any("this kernel takes one element" in line for line in rest)
    assert e.value.hint == "build without hip:gfx942, or choose another solution for this op with --solution"


def test_a_crash_of_the_compiler_is_that_kernels_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import os\nimport sys\nprint('LLVM ERROR: cannot select', file=sys.stderr, flush=True)\nos.abort()\n"
    (tmp_path / "crashing_kernels.py").write_text(text)
    with pytest.raises(TargetError) as e:
        compile_kernels([(scale_kernel(module="crashing_kernels"), HOPPER)])
    assert "of crashing_kernels does not compile for cuda:sm_90a:\nLLVM ERROR: cannot select" in e.value.message
    assert e.value.message.endswith("the compiler ended with status -6")


def test_failures_can_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not compile, one that ends its compiler, one that asks for too much: the others are compiled."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "crashing_kernels.py").write_text("import os\nos._exit(7)\n")
    crashing, greedy = (
        DeviceKernel("crashing_kernels", "scale", (("x", "*fp32"),), (), 4, 1),
        product_kernel(tile=128, num_stages=9),
    )
    jobs = [(kernel, HOPPER) for kernel in (broken_kernel(), crashing, scale_kernel(), greedy, scale_kernel(512))]
    for _ in range(2):  # the second time some come from the cache
        failures: dict[codegen.Job, TargetError] = {}
        done = compile_kernels(jobs, workers=1, cache=tmp_path / "cache", failures=failures)
        assert list(done) == [jobs[2], jobs[4]]
        assert failures.keys() == {jobs[0], jobs[1], jobs[3]}
        assert "takes one element" in str(failures[jobs[0]])
        assert "status 7" in str(failures[jobs[1]])


def test_wrong_parameters_are_refused() -> None:
    whole = scale_kernel()
    kernel = DeviceKernel(whole.module, whole.function, whole.signature[:-1], whole.constants, 4, 1)
    with pytest.raises(TargetError, match="need types or constants for x, out, n, factor, BLOCK, have"):
        compile_kernels([(kernel, HOPPER)])


def test_too_much_shared_memory_says_how_much() -> None:
    kernel = product_kernel(tile=128, num_stages=6)
    assert compile_kernels([(kernel, HOPPER)], workers=1)[kernel, HOPPER].shared_bytes == 6 * 32768
    with pytest.raises(TargetError) as e:
        compile_kernels([(kernel, Target("cuda", "sm_120a"))], workers=1)
    assert e.value.message.startswith("kernel product[DEPTH=64, K=512, N=512, TILE=128; 4 warps, 6 stages] for cuda:")
    assert e.value.message.endswith("need 163840 bytes of shared memory a block, have 101376")
    assert e.value.hint == "use smaller tiles or fewer stages in tiny_kernels for cuda:sm_120a"


def test_an_error_ends_every_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[codegen._Worker] = []
    start = codegen._Worker.__init__

    def recorded(self: codegen._Worker, *args: Any) -> None:
        start(self, *args)
        started.append(self)

    monkeypatch.setattr(codegen._Worker, "__init__", recorded)
    too_large = (product_kernel(tile=128, num_stages=6), Target("cuda", "sm_120a"))
    with pytest.raises(TargetError, match="bytes of shared memory a block"):
        compile_kernels([too_large, *((scale_kernel(2**n), HOPPER) for n in range(1, 11))], workers=2)
    assert len(started) == 2 and all(worker._process.poll() is not None for worker in started)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_moves_on_a_terminal_only(tmp_path: Path, terminal: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    for _ in range(2):
        compile_kernels([(scale_kernel(), HOPPER)], workers=1, cache=tmp_path, progress=stream)
    assert ("1/1" in stream.getvalue() and "compile:" in stream.getvalue()) if terminal else not stream.getvalue()
