"""The whole loop: an engine draws, a trainer learns and scores, the engine takes its weights, and the dump agrees."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from trainer_cases import artifact_of, bounds, hf_model, open_engine, write

from tokenspeed import trainer
from tokenspeed.cli import main
from tokenspeed.runtime.align.check import check_dump
from tokenspeed.runtime.align.dump import Dump, Sequence, read_dump, write_dump
from tokenspeed.runtime.align.make import dump_of
from tokenspeed.trainer import Aligned

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], list(range(20, 60))]


def scored(aligned: Aligned, dump: Dump, commit: str) -> Dump:
    """The dump's sequences with the trainer's log-probabilities."""
    ids = [torch.tensor(s.ids) for s in dump.sequences]
    with torch.no_grad():
        values = aligned.logprobs(torch.cat(ids), cu_seqlens=bounds(ids))
    pieces = [values[begin + 1 : end].tolist() for begin, end in pairwise(bounds(ids))]
    sequences = (Sequence(s.ids, piece, s.prompt_len) for s, piece in zip(dump.sequences, pieces, strict=True))
    return Dump(tuple(sequences), commit=commit)


def test_a_trainers_step_reaches_the_engine_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write(tmp_path / "checkpoint")
    artifact = artifact_of(checkpoint, tmp_path / "artifact", "bfloat16")
    aligned = trainer.align(hf_model(checkpoint), artifact, threads=2)
    with open_engine(artifact) as engine:
        rollouts = dump_of(engine, PROMPTS, max_tokens=12, temperature=1.0, seed=3)
        assert scored(aligned, rollouts, "0").sequences == tuple(replace(s, seed=None) for s in rollouts.sequences)
        with torch.no_grad():
            for parameter in aligned.model.parameters():
                parameter.mul_(1.25)
        after = scored(aligned, rollouts, "1")
        assert after.sequences != rollouts.sequences
        assert not check_dump(engine, after)[0].passed
        weights = aligned.save_weights(tmp_path / "weights.safetensors")
        engine.update_weights(weights, version="1")
        assert all(v.passed for v in check_dump(engine, after))
    write_dump(tmp_path / "dump", after)
    assert read_dump(tmp_path / "dump") == after
    check = ["align", "check", str(artifact), str(tmp_path / "dump"), "--threads", "1", "--json"]
    assert main(check) == 12
    assert not json.loads(capsys.readouterr().out)["passed"]
    assert main([*check, "--weights", str(weights)]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
