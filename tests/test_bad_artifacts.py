"""Damaged, truncated, hostile and foreign artifacts: every one is refused with a typed error, none crashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import cli, cli_environment

from tokenspeed.artifact import DIGEST, MANIFEST, Artifact, Manifest
from tokenspeed.cli.main import main
from tokenspeed.compile.build import build
from tokenspeed.errors import (
    ArtifactError,
    TokenSpeedError,
)
from tokenspeed.publish import publishing
from tokenspeed.runtime import loader, places
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.target import Target, runnable_targets
from tokenspeed.verify_artifact import verify_graphs


@pytest.fixture
def damaged(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the tiny artifact, to be damaged."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "damaged"))


def flip(path: Path, position: int, bits: int = 1) -> None:
    with path.open("r+b") as f:
        f.seek(position)
        (byte,) = f.read(1)
        f.seek(position)
        f.write(bytes([byte ^ bits]))


def full_check(path: Path) -> None:
    artifact = Artifact.open(path)
    artifact.verify("full")
    verify_graphs(artifact)


def test_any_flipped_byte_of_any_file_is_noticed(damaged: Path) -> None:
    rng = random.Random(0)
    files = sorted(p for p in damaged.rglob("*") if p.is_file())
    assert len(files) > 10
    for path in files:
        size = path.stat().st_size
        every = path.name in (DIGEST, MANIFEST)  # every kind of byte of these: digits, names, digests, brackets
        positions = range(0, size, 1 if size < 100 else 17) if every else {0, size - 1, *rng.choices(range(size), k=4)}
        for position in positions:
            bits = 1 << rng.randrange(8)
            flip(path, position, bits)
            with pytest.raises(ArtifactError):
                full_check(damaged)
            flip(path, position, bits)
    full_check(damaged)


def test_a_flipped_byte_of_a_tar_is_noticed(tiny_artifact: Path, tmp_path: Path) -> None:
    with publishing(tmp_path / "a.tar", archive=True) as folder:
        shutil.copytree(tiny_artifact, folder, dirs_exist_ok=True)
    full_check(tmp_path / "a.tar")
    size, rng = (tmp_path / "a.tar").stat().st_size, random.Random(1)
    good = Artifact.open(tmp_path / "a.tar")
    covered = [good.locate(name) for name in [*good.manifest.files, MANIFEST, DIGEST]]
    for position in rng.choices(range(size), k=60):
        flip(tmp_path / "a.tar", position)
        if any(at.offset <= position < at.offset + at.bytes for at in covered):
            with pytest.raises(ArtifactError):
                full_check(tmp_path / "a.tar")
        else:  # headers and padding: noticed, or without a meaning
            try:
                full_check(tmp_path / "a.tar")
            except ArtifactError:
                pass
            else:
                assert Artifact.open(tmp_path / "a.tar").digest == good.digest
        flip(tmp_path / "a.tar", position)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.97])
def test_truncated_archives(keep: float, tiny_artifact: Path, tmp_path: Path) -> None:
    with publishing(tmp_path / "a.tar", archive=True) as folder:
        shutil.copytree(tiny_artifact, folder, dirs_exist_ok=True)
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ArtifactError, match=r"is no artifact|is missing|was cut short|is damaged|has \d+ bytes"):
        full_check(tmp_path / "a.tar")


def reseal(folder: Path) -> None:
    """Make the digests right again, so that the damage reaches what lies behind them."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: Any) -> None:
    raw = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(raw)
    (folder / DIGEST).write_text(hashlib.sha256(raw).hexdigest() + "\n")


def graph_file(folder: Path) -> Path:
    return folder / Artifact.open(folder).manifest.targets[0].buckets[0].graph


def test_a_damaged_graph_behind_right_digests_is_refused_by_its_checksum(damaged: Path) -> None:
    path = graph_file(damaged)
    flip(path, path.stat().st_size // 2)
    reseal(damaged)
    with pytest.raises(ArtifactError, match=r"decode-1\.tslg cannot be loaded: .*its checksum does not match"):
        loader.load(damaged, LoadOptions(kv_gib=0.05, threads=1))
    with pytest.raises(ArtifactError, match=r"decode-1\.tslg: .*checksum"):
        full_check(damaged)


FUZZ = """
import random, struct, sys, zlib
from tokenspeed import _native
data, count = open(sys.argv[1], "rb").read(), int(sys.argv[2])
stride, weights, *sizes = map(int, sys.argv[4:])
device = _native.CpuDevice(1)
device.load_weights(sys.argv[3], 0, weights)
for region, nbytes in zip(("kv", "arena", "io", "state"), sizes):
    device.allocate(region, nbytes)
assert device.load_graph(data, stride) == 0
rng = random.Random(count)
refused = 0
for number in range(count):
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(damaged))
        kind = rng.randrange(4)
        if kind == 0:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged[at] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            at -= at % 4
            word = rng.choice((0, 1, 2**31, 2**32 - 1, len(data), rng.getrandbits(32)))
            damaged[at : at + 4] = struct.pack("<I", word)
        else:
            del damaged[at : at + rng.randrange(1, 40)]
    if len(damaged) >= 64 and rng.random() < 0.9:  # so that it is read beyond the checksum
        struct.pack_into("<I", damaged, 8, len(damaged))
        struct.pack_into("<I", damaged, 32, zlib.crc32(damaged[64:]))
    try:
        device.load_graph(bytes(damaged), stride)
    except _native.GraphError:
        refused += 1
device.close()
print(refused)
"""


def test_hostile_graphs_never_crash_the_native_reader(tiny_artifact: Path) -> None:
    """Random damage with the checksum put right: a GraphError or, where the bytes mean something legal, a graph."""
    section = Artifact.open(tiny_artifact).manifest.targets[0]
    sizes = (section.kv_page_bytes, section.weights_bytes, section.kv_page_bytes)
    regions = (section.arena_bytes, section.io_bytes, section.state_bytes)
    files = (str(tiny_artifact / section.buckets[-1].graph), "6000", str(tiny_artifact / section.weights))
    ran = subprocess.run(
        [sys.executable, "-c", FUZZ, *files, *map(str, (*sizes, *regions))],
        capture_output=True,
        text=True,
        env=cli_environment(),
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout) > 4000


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


OTHER_KINDS: list[Any] = [None, -1, 0, 2**62, 2**70, "x", [], {}, 1.5, True, [1]]


def test_hostile_manifests_are_refused_or_load(damaged: Path) -> None:
    """Every value of the manifest replaced by values of other kinds, digests put right: never an untyped error."""
    good = json.loads((damaged / MANIFEST).read_text())
    rng, tried = random.Random(2), 0
    paths = [p for p in leaves(good) if p[0] != "files"]
    for path in rng.sample(paths, 70):
        for value in rng.sample(OTHER_KINDS, 3):
            manifest = json.loads(json.dumps(good))
            inner = manifest
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            write_manifest(damaged, manifest)
            tried += 1
            try:
                loaded = loader.load(damaged, LoadOptions(kv_gib=0.05, threads=1))
            except TokenSpeedError:
                continue
            loaded.executor.device.close()
    assert tried == 210


@pytest.mark.parametrize(
    ("name", "args"), [("selection.json", ("explain",)), ("program.json", ("inspect", "--program"))]
)
def test_reports_are_checked_before_they_are_shown(damaged: Path, name: str, args: tuple[str, ...]) -> None:
    whole = (damaged / name).read_bytes()
    for damage, text in ((whole.replace(b"0", b"1"), "its SHA-256 is not the manifest's"), (None, "is missing")):
        (damaged / name).unlink() if damage is None else (damaged / name).write_bytes(damage)
        ran = cli(args[0], damaged, *args[1:])
        assert (ran.returncode, ran.stdout) == (7, "")
        assert f"{name} is damaged: {text}" in ran.stderr or f"the file {name} {text}" in ran.stderr
        assert ran.stderr.splitlines()[-1].startswith("hint: ")


GONE = object()


def set_in(value: Any, *path: Any, to: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    if to is GONE:
        del value[path[-1]]
    else:
        value[path[-1]] = to


DECISIONS = ("report", "targets", 0, "decisions")


@pytest.mark.parametrize(
    ("path", "to", "text"),
    [
        (("report",), [], "it must be an object, not []"),
        (("report", "targets"), GONE, "it lacks 'targets'"),
        (("report", "targets", 0), 5, "it.targets[0] must be an object, not 5"),
        (("report", "targets", 0, "required_features"), GONE, "it.targets[0] lacks 'required_features'"),
        (("report", "targets", 0, "target"), "\ud800", "is not JSON: 'utf-8' codec can't encode"),
        ((*DECISIONS, 0, "sizes"), [], "decisions[0].sizes must be an object, not []"),
        ((*DECISIONS, 0, "sizes", "N"), True, "decisions[0].sizes.N must be a whole number, not True"),
        ((*DECISIONS, 1, "op"), None, "decisions[1].op must be a text, not None"),
        ((*DECISIONS, 1, "candidates", 0, "reasons"), "x", "candidates[0].reasons must be a list, not 'x'"),
    ],
)
def test_a_malformed_selection_report(damaged: Path, path: tuple[Any, ...], to: Any, text: str) -> None:
    box = {"report": json.loads((damaged / "selection.json").read_text())}
    set_in(box, *path, to=to)
    (damaged / "selection.json").write_text(json.dumps(box["report"]))
    reseal(damaged)
    for args in ((), ("--json",), ("--op", "linear"), ("--target", "cpu:x86-64-v3")):
        code, stdout, stderr = in_process("explain", damaged, *args)
        assert (code, stdout) == (7, "")
        assert "selection.json is" in stderr and text in stderr
        assert stderr.endswith("\nhint: rebuild the artifact\n")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (None, "it must be an object, not None"),
        ({"ops": {}}, "it.ops must be a list, not {}"),
        ({"ops": [{"name": "n", "kind": "k", "inputs": ["x", 1], "outputs": []}]}, "ops[0].inputs[1] must be a text"),
        ({"ops": [{"name": ["x" * 99], "kind": "k", "inputs": [], "outputs": []}]}, "ops[0].name must be a text, not"),
    ],
)
def test_a_malformed_program(damaged: Path, program: Any, text: str) -> None:
    (damaged / "program.json").write_text(json.dumps(program))
    reseal(damaged)
    for args in (("--program",), ("--program", "--json")):
        code, stdout, stderr = in_process("inspect", damaged, *args)
        assert (code, stdout) == (7, "")
        assert "program.json is malformed: " in stderr and text in stderr
        assert stderr.endswith("\nhint: rebuild the artifact\n")


def in_process(*args: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line, without a process of its own."""
    stdout, stderr = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main([str(arg) for arg in args])
    stdout.flush()
    return code, stdout.buffer.getvalue().decode(), stderr.getvalue()


def test_a_damaged_graph_is_not_inspected(damaged: Path) -> None:
    path = graph_file(damaged)
    path.write_bytes(path.read_bytes()[:100])
    name = path.relative_to(damaged).as_posix()
    code, stdout, stderr = in_process("inspect", damaged, "--graph", name)
    assert (code, stdout) == (7, "")
    assert stderr.startswith(f"error: {damaged}: {name}: launch graph: ")
    assert stderr.endswith("\nhint: rebuild the artifact\n")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("targets", 0, "weights_bytes"), 1 << 40, "and the weights of cpu:"),
        (("targets", 0, "weights_offset"), 65, "weights_offset is 65, no multiple of 64"),
        (("targets", 0, "weights"), "nowhere", "the file nowhere is missing"),
        (("targets", 0, "buckets"), [], "need one for every step, have none for a decode step of 1 tokens"),
        (("targets", 0, "buckets", 0, "bucket", "num_tokens"), 1 << 20, "buckets: need sizes that grow together"),
        (("targets", 0, "io", 1, "offset"), 4, "places token_ids of region io otherwise than a build"),
        (("targets", 0, "io_bytes"), 1 << 30, "places io_bytes of region io otherwise than a build"),
        (("targets", 0, "state", 0, "shape"), [1], "places last_tokens of region state otherwise than a build"),
        (("targets",), [], "the envelope names other targets than its sections: none"),
        (("envelope", "max_prefill_tokens", "value"), 4096, "need one for every step, have none for a mixed step"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_not_verified(
    damaged: Path, path: tuple[Any, ...], value: Any, text: str
) -> None:
    manifest = json.loads((damaged / MANIFEST).read_text())
    set_in(manifest, *path, to=value)
    write_manifest(damaged, manifest)
    code, stdout, stderr = in_process("verify", damaged)
    assert (code, stdout) == (7, "")
    assert text in stderr and "\nhint: " in stderr


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("targets", 0, "target"), "cpu:z80", "manifest.json is malformed: unknown target 'cpu:z80'"),
        (("envelope", "targets", "value"), ["gpu"], "manifest.json is malformed: unknown target 'gpu'"),
        (("envelope", "dtype", "source"), [1], "malformed: dtype was set by [1]; it must be one of default"),
        (("targets", 0, "io", 1, "offset"), 1 << 40, "malformed: the tensor token_ids does not lie inside its region"),
        (("tokenspeed_version",), 3, "malformed: it.tokenspeed_version must be a text, not 3"),
        (("model", "name"), "\ud800", "manifest.json is not a manifest"),
        (("format_version",), None, "the artifact has format version None"),
    ],
)
def test_a_malformed_manifest_is_shown_by_no_command(
    damaged: Path, path: tuple[Any, ...], value: Any, text: str
) -> None:
    manifest = json.loads((damaged / MANIFEST).read_text())
    set_in(manifest, *path, to=value)
    write_manifest(damaged, manifest)
    for command in ("inspect", "explain", "verify"):
        code, stdout, stderr = in_process(command, damaged)
        assert (code, stdout) == (7, "")
        assert text in stderr and "\nhint: " in stderr


TOKENIZER, TEXTS = "tokenizer/tokenizer.json", "tokenizer/config.json"


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        (TOKENIZER, b"", "tokenizer.json cannot be read"),
        (TOKENIZER, b'{"model": {}}', "tokenizer.json cannot be read"),
        (TEXTS, b"[" * 100_000, "config.json is not JSON"),
        (TEXTS, b"[]", "config.json must hold a JSON object"),
        (TEXTS, b'{"eos_token_ids": 2}', "need token ids as eos_token_ids"),
        (TEXTS, b'{"eos_token_ids": ["x"]}', "need token ids as eos_token_ids"),
        (TEXTS, b'{"eos_token_ids": [], "bos_token": 1}', "need a text or null as bos_token"),
        (TEXTS, b'{"eos_token_ids": [], "add_bos": true}', "add_bos needs a bos_token, have None"),
    ],
)
def test_hostile_tokenizers(damaged: Path, name: str, data: bytes, text: str) -> None:
    (damaged / name).write_bytes(data)
    reseal(damaged)
    with pytest.raises(ArtifactError, match=text):
        loader.load(damaged, LoadOptions(kv_gib=0.05, threads=1))


def test_a_deeply_nested_manifest() -> None:
    with pytest.raises(ArtifactError, match="is not a manifest"):
        Manifest.from_bytes(b"[" * 100_000)


def test_an_artifact_of_other_kernels(damaged: Path) -> None:
    manifest = json.loads((damaged / MANIFEST).read_text())
    manifest["targets"][0]["kernel_abi"] = 999
    write_manifest(damaged, manifest)
    with pytest.raises(
        ArtifactError, match=r"built against kernels 'native' ABI 999; this runtime has 'native' ABI"
    ) as e:
        loader.load(damaged)
    assert e.value.hint == "rebuild the artifact with this version of `tokenspeed build`"


def test_an_artifact_for_another_cpu(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Target("cpu", "x86-64-v3")
    monkeypatch.setattr(places, "runnable_targets", lambda: ())
    with pytest.raises(ArtifactError) as caught:
        loader.load(tiny_artifact)
    assert caught.value.message == f"the artifact was built for {Target.native()}; this machine runs no target"
    monkeypatch.setattr(places, "runnable_targets", lambda: (old,))
    if Target.native() != old:
        with pytest.raises(ArtifactError, match=f"this machine runs {old}") as caught:
            loader.load(tiny_artifact)
        assert caught.value.hint == f"rebuild it with `tokenspeed build --target {old}`"
    with pytest.raises(ArtifactError, match=r"this machine cannot run cpu:x86-64-v4\+amx: it runs cpu:x86-64-v3"):
        loader.load(tiny_artifact, LoadOptions(target=Target("cpu", "x86-64-v4+amx")))


@pytest.mark.skipif(len(runnable_targets()) == 4, reason="this machine runs every target")
def test_a_graph_for_another_cpu_is_refused_by_the_device_as_well(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amx = Target("cpu", "x86-64-v4+amx")
    build(tiny_checkpoint, tmp_path / "a", targets=[str(amx)], dtype="bfloat16", max_model_len=128)
    assert cli("verify", tmp_path / "a").returncode == 0  # verifying needs no such machine
    monkeypatch.setattr(places, "runnable_targets", lambda: (amx,))
    with pytest.raises(ArtifactError, match=r"the kernel needs amx.* instructions, but this processor runs"):
        loader.load(tmp_path / "a", LoadOptions(kv_gib=0.05, threads=1))
