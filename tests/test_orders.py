"""The orders of a trainer on the whole walk: what a build makes of each switch, and what is served then."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_double import gpu_artifact, plug_in
from tiny_artifact import tiny, write_checkpoint
from tiny_llama import tiny_tokens

from tokenspeed.artifact import DIGEST, MANIFEST, Artifact
from tokenspeed.cli.main import main
from tokenspeed.compile.build import build
from tokenspeed.compile.checkpoint import open_checkpoint
from tokenspeed.compile.derive import rope_frequencies, rope_table_of
from tokenspeed.compile.interpret import run_prompt
from tokenspeed.compile.program import Program
from tokenspeed.errors import ArtifactError
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.loader import load as load_parts
from tokenspeed.runtime.request import SamplingParams
from tokenspeed.target import Target
from tokenspeed.verify_artifact import verify_graphs

SMALL: dict[str, Any] = {
    "page_size": 32, "split_positions": 64, "max_model_len": 160, "max_num_seqs": 4, "max_prefill_tokens": 96,
    "max_logit_rows": 96,
}  # fmt: skip
ORDERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "unfused": {"layer_boundary_norm": "unfused"},
    "target": {"rope_table_device": "target"},
    "both": {"layer_boundary_norm": "unfused", "rope_table_device": "target"},
}
OPTIONS = LoadOptions(kv_gib=0.02, threads=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("orders") / "m", tiny(num_layers=2, rope_theta=10000.0))


@pytest.fixture(scope="module")
def artifacts(checkpoint: Path) -> dict[str, Path]:
    """A bfloat16 artifact of each of ORDERS."""
    made = {name: checkpoint.parent / name for name in ORDERS}
    for name, path in made.items():
        build(checkpoint, path, dtype="bfloat16", **SMALL, **ORDERS[name])
    return made


def digests(artifact: Path) -> dict[str, str]:
    """Of every file that a step depends on."""
    files = Artifact.open(artifact).manifest.files
    return {name: entry.sha256 for name, entry in files.items() if name.startswith(("graphs/", "weights/", "kernels/"))}


def program_of(artifact: Path) -> Program:
    return Program.from_json((artifact / "program.json").read_text())


def test_each_switch_alone_makes_other_graphs(artifacts: dict[str, Path]) -> None:
    of = {name: digests(path) for name, path in artifacts.items()}
    assert len({tuple(sorted(d.items())) for d in of.values()}) == len(ORDERS)
    (weights,) = (name for name in of["usual"] if name.startswith("weights/"))
    assert of["usual"][weights] == of["unfused"][weights] != of["target"][weights] == of["both"][weights]
    for name, path in artifacts.items():
        section = Artifact.open(path).manifest.targets[0]
        filled = name in ("target", "both")
        assert (section.prelude is not None) is filled is any("prelude" in file for file in of[name])
        saved = Artifact.open(artifacts["usual"]).manifest.targets[0].weights_bytes - section.weights_bytes
        table = 160 * 16 * 4
        assert saved == (table - 64 if filled else 0)  # eight frequencies take 64 bytes, as all that is aligned
        verify_graphs(Artifact.open(path))


TOKENS = tiny_tokens(120, seed=4)


def scores(artifact: Path, tokens: Sequence[int] = TOKENS) -> tuple[float, ...]:
    """Log-probability of each of ``tokens`` but the first, as served."""
    with load(artifact, options=OPTIONS) as engine:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = engine.generate(list(tokens), params)
    return tuple(entry.logprob for entry in output.prompt_logprobs or () if entry is not None)


def test_float32_needs_no_rounding_and_shows_the_table(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("usual", "unfused", "target"):
        build(checkpoint, tmp_path / name, dtype="float32", **SMALL, **ORDERS[name])
    assert digests(tmp_path / "usual") == digests(tmp_path / "unfused")
    usual, target = (np.array(scores(tmp_path / name)) for name in ("usual", "target"))
    assert 0 < np.abs(usual - target).max() < 1e-4


def test_reports_say_what_runs_before_the_first_step(
    artifacts: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(artifacts["both"]), "--op", "rope_table"]) == 0
    out = capsys.readouterr().out
    assert "rope_table_avx2" in out and "prelude" in out
    report = json.loads((artifacts["both"] / "selection.json").read_text())["targets"][0]["decisions"]
    (decision,) = (d for d in report if d["op"] == "rope_table")
    assert decision["buckets"] == ["prelude"] and decision["sizes"] == {"head_dim": 16, "num_positions": 160}
    assert all(d["sizes"]["rounded"] == 1 for d in report if d["op"] == "linear_add")
    assert main(["inspect", str(artifacts["both"])]) == 0 and main(["verify", str(artifacts["both"])]) == 0
    assert main(["explain", str(artifacts["usual"]), "--op", "rope_kv_write"]) == 0
    assert "prelude" not in capsys.readouterr().out.split("rope_kv_write", 1)[1]


@pytest.mark.parametrize("name", ORDERS)
def test_the_engine_scores_as_the_interpreter_does(name: str, artifacts: dict[str, Path], checkpoint: Path) -> None:
    have = scores(artifacts[name])
    logits = run_prompt(program_of(artifacts[name]), open_checkpoint(checkpoint).read, TOKENS).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    distance = np.abs(have - want[np.arange(119), TOKENS[1:]])
    assert distance.max() < 0.1 and distance.mean() < 0.015
    if ORDERS[name].get("layer_boundary_norm"):
        assert have != scores(artifacts["usual"])


def test_the_table_is_there_when_the_artifact_is_loaded(artifacts: dict[str, Path]) -> None:
    loaded = load_parts(artifacts["target"], OPTIONS)
    try:
        section = loaded.section
        assert section.prelude is not None and loaded.seconds["prelude"] > 0
        (table,) = section.prelude.tables
        state = np.frombuffer(loaded.executor.device.view("state"), np.uint8)
        have = state[table.offset : table.offset + table.nbytes].view(np.float32).reshape(table.shape)
        source = program_of(artifacts["target"]).values["rope_frequencies"].source
        assert source is not None
        np.testing.assert_array_equal(have, rope_table_of(rope_frequencies(source), 160, 1.0))
    finally:
        loaded.executor.device.close()
    usual = load_parts(artifacts["usual"], OPTIONS)
    usual.executor.device.close()
    assert "prelude" not in usual.seconds


def test_the_table_has_the_bits_that_torch_computes_but_for_its_own_rounding(artifacts: dict[str, Path]) -> None:
    """Torch's float32 cosine is right to an ulp, ours to half of one."""
    torch = pytest.importorskip("torch")
    source = program_of(artifacts["target"]).values["rope_frequencies"].source
    assert source is not None
    frequencies = rope_frequencies(source)
    angles = torch.arange(160)[:, None].float() * torch.from_numpy(frequencies)  # LlamaRotaryEmbedding's products
    theirs = torch.cat([angles.cos(), angles.sin()], 1).numpy()
    np.testing.assert_allclose(rope_table_of(frequencies, 160, 1.0), theirs, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 64}, "places rope_table.memory of region state otherwise than a build"),
        ({"shape": [161, 16]}, "the tensor rope_table.memory does not lie inside its region"),
        ({"dtype": "float99"}, "malformed"),
    ],
)
def test_a_prelude_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(artifacts["target"], tmp_path / "copy"))
    manifest = json.loads((copy / MANIFEST).read_bytes())
    manifest["targets"][0]["prelude"]["tables"][0].update(change)
    text = json.dumps(manifest).encode()
    (copy / MANIFEST).write_bytes(text)
    (copy / DIGEST).write_text(hashlib.sha256(text).hexdigest() + "\n")
    with pytest.raises(ArtifactError, match=message):
        verify_graphs(Artifact.open(copy))


def test_a_damaged_prelude_is_noticed_at_load(artifacts: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifacts["target"], tmp_path / "copy"))
    (file,) = copy.rglob("prelude.tslg")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"prelude\.tslg is damaged"):
        load_parts(copy, OPTIONS)
    file.unlink()
    with pytest.raises(ArtifactError, match=r"prelude\.tslg is missing"):
        load_parts(copy, dataclasses.replace(OPTIONS, verify="structure"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_computes_in_the_orders_of_the_artifact(dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenspeed import trainer

    build(checkpoint, tmp_path / "a", dtype=dtype, **SMALL, **ORDERS["both"])
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    aligned = trainer.align(model, tmp_path / "a", threads=1)
    tokens = tiny_tokens(90, seed=4)
    have = aligned.logprobs(torch.tensor([tokens]))
    assert have[0, 1:].tolist() == list(scores(tmp_path / "a", tokens))
    have.sum().backward()
    theirs = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    aligned.detach()
    logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    logits.gather(1, torch.tensor(tokens[1:])[:, None]).sum().backward()
    ours = model.model.layers[0].self_attn.q_proj.weight.grad
    assert (theirs - ours).norm() < (1e-4 if dtype == "float32" else 0.05) * ours.norm()


def test_a_gpu_runs_the_prelude_too(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = gpu_artifact(artifacts["target"], tmp_path / "both")
    plug_in(monkeypatch)
    with load(both, options=LoadOptions(target=Target.parse("cuda:sm_90a"), kv_gib=0.02, threads=1)) as engine:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = engine.generate(TOKENS, params)
    have = tuple(entry.logprob for entry in output.prompt_logprobs or () if entry is not None)
    assert have == scores(artifacts["target"])
