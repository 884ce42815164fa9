"""Checkpoints of random weights: reproducible, of the right spread, with a tokenizer; and a whole build from one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_smollm2 import run
from tiny_artifact import hf_config, tiny, write_checkpoint

from tokenspeed.compile.build import build
from tokenspeed.compile.checkpoint import BFLOAT16, Checkpoint, open_checkpoint, tensor_shapes
from tokenspeed.compile.dummy_weights import DummyCheckpoint, made_up_tokenizer, random_weights
from tokenspeed.errors import CheckpointError, UsageError
from tokenspeed.runtime.detokenizer import Detokenizer
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import SamplingParams
from tokenspeed.runtime.tokenizer import Tokenizer

SHAPES = Path(__file__).resolve().parent.parent / "artifacts" / "recipes" / "shapes"


def shape_only(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(tiny(), **changes)))
    return directory


def test_a_tensor_depends_on_seed_and_name_alone(tmp_path: Path) -> None:
    source: Checkpoint = DummyCheckpoint(shape_only(tmp_path / "shape"), seed=7)
    assert source.names() == tuple(tensor_shapes(source.config))
    first = {name: source.read(name) for name in source.names()}
    again = DummyCheckpoint(tmp_path / "shape", seed=7)
    for name in reversed(again.names()):
        assert again.info(name) == (first[name].dtype, first[name].shape) and first[name].dtype == BFLOAT16
        assert again.read(name).tobytes() == first[name].tobytes()
    assert len({tensor.tobytes() for tensor in first.values()}) == len(first)
    assert all(DummyCheckpoint(tmp_path / "shape", 8).read(n).tobytes() != first[n].tobytes() for n in first)


def test_the_numbers_are_these_on_every_machine() -> None:
    """Blocks of 2^20 from one generator each, whatever runs them: pinned, as results are compared by seed."""
    weights = random_weights(3, "model.norm.weight", (1 << 20) + 3, mean=0.0)
    assert hashlib.sha256(weights.tobytes()).hexdigest()[:16] == "9eac0ad92b653af0"
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        alone = random_weights(3, "model.norm.weight", (1 << 20) + 3, mean=0.0)
    finally:
        os.sched_setaffinity(0, before)
    assert alone.tobytes() == weights.tobytes()


def test_matrices_spread_around_zero_and_norm_weights_around_one(tmp_path: Path) -> None:
    source = DummyCheckpoint(shape_only(tmp_path / "shape"), seed=0)
    for name in source.names():
        tensor = source.read(name).astype(np.float64)
        mean, tolerance = float(tensor.ndim == 1), 5 * 0.02 / np.sqrt(tensor.size)
        assert abs(tensor.mean() - mean) < tolerance, name
        assert abs(tensor.std() - 0.02) < tolerance + 1e-3 and abs(tensor - mean).max() < 0.1, name


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_the_example_shapes_open_and_say_what_they_are(name: str) -> None:
    source = DummyCheckpoint(SHAPES / name, seed=1)
    parameters = sum(int(np.prod(shape)) for shape in tensor_shapes(source.config).values())
    assert parameters == {"llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400}[name]
    assert source.config.name == name and source.config.num_kv_heads == 8
    tokenizer = source.tokenizer()
    assert tokenizer.bos_token == "<|begin|>" and tokenizer.eos_token_ids == (128001, 128008, 128009)
    assert set(source.digests()) == {"config.json", "dummy-weights"}


def test_the_seed_is_part_of_the_digests_and_the_weights_in_the_directory_are_not(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "whole")
    one, two = DummyCheckpoint(directory, 1).digests(), DummyCheckpoint(directory, 2).digests()
    assert set(one) == {"config.json", "tokenizer.json", "tokenizer_config.json", "dummy-weights"}
    assert {name for name in one if one[name] != two[name]} == {"dummy-weights"}
    assert DummyCheckpoint(directory, 1).tokenizer() == open_checkpoint(directory).tokenizer()


@pytest.mark.parametrize(("bos", "eos"), [(128000, [128001, 128009]), (1, 2), (None, None), (0, 255)])
def test_the_made_up_tokenizer_encodes_every_text_and_decodes_every_id(tmp_path: Path, bos: Any, eos: Any) -> None:
    config = DummyCheckpoint(
        shape_only(tmp_path / "shape", bos_token_id=bos, eos_token_id=eos, vocab_size=128256), 0
    ).config
    files = made_up_tokenizer(config)
    settings = {**files.__dict__, "eos_token_ids": list(files.eos_token_ids)}
    tokenizer = Tokenizer(files.tokenizer_json, settings)
    text = "Grüße, 世界! \n\t\0 naïve"
    ids = tokenizer.encode(text)
    first = [] if bos is None else [bos]
    assert ids[: len(first)] == first and len(ids) < len(first) + len(text.encode())  # letters merge
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids[len(first) :]) == text.encode()
    assert len({tokenizer.token_bytes(i) for i in range(300)} - {b""}) >= 256
    stream = Detokenizer(tokenizer)
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, 2000)
    shown = "".join(stream.push(int(token)) for token in (*drawn, *range(280), config.vocab_size - 1)) + stream.finish()
    assert len(shown) > 2000  # most ids are three letters
    assert tokenizer.chat.render([{"role": "user", "content": "hi"}]) == "user: hi\nassistant: "


def test_a_model_without_weights_is_built_and_generates(tmp_path: Path) -> None:
    directory = shape_only(tmp_path / "shape", tie_word_embeddings=False)
    digests = [
        build(directory, tmp_path / f"out{i}", dummy_weights=seed, max_model_len=64, max_num_seqs=2).digest
        for i, seed in enumerate((5, 5, 6))
    ]
    assert digests[0] == digests[1] != digests[2]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with load(tmp_path / "out0", options=LoadOptions(kv_gib=0.05, threads=1)) as engine:
        [outcome] = run(engine, [[1, 2, 3]], [greedy])
    assert len(outcome.tokens) == 20 and len(set(outcome.tokens)) > 1


def test_what_cannot_be_made_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dummy-weights is -1; it must be 0 or more"):
        DummyCheckpoint(shape_only(tmp_path / "shape"), -1)
    with pytest.raises(
        CheckpointError, match=r"has no shape for dummy weights: need a directory with config\.json"
    ) as e:
        DummyCheckpoint(tmp_path, 0)
    assert e.value.hint == "artifacts/recipes/shapes/ has examples"
    small = DummyCheckpoint(shape_only(tmp_path / "small", vocab_size=256, bos_token_id=0), 0)
    with pytest.raises(CheckpointError, match="no tokenizer can be made up for 256 tokens, 1 of them special: need"):
        small.tokenizer()
