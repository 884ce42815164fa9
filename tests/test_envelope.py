"""The envelope resolves with provenance, checks ranges, and refuses contradictions in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.envelope import Envelope, read_recipe, resolve
from tokenspeed.errors import EnvelopeError, TargetError
from tokenspeed.target import Target, missing_flags, runnable_targets

V3 = (Target("cpu", "x86-64-v3"),)


def make(**flags: object) -> Envelope:
    return resolve(model="m", max_position_embeddings=8192, vocab_size=64, flags=flags, default_targets=V3)


def test_every_field_knows_who_set_it() -> None:
    envelope = resolve(
        model="smol",
        max_position_embeddings=8192,
        vocab_size=64,
        recipe={"dtype": "bf16", "max_num_seqs": 8},
        flags={"dtype": "float32", "page_size": None},
        default_targets=V3,
    )
    sources = {name: setting.source for name, setting in envelope.settings.items()}
    assert envelope.dtype == "float32" and sources["dtype"] == "flag"
    assert envelope.max_num_seqs == 8 and sources["max_num_seqs"] == "recipe"
    assert envelope.max_model_len == 8192 and sources["max_model_len"] == "checkpoint"
    assert envelope.max_logit_rows == 8 and sources["max_logit_rows"] == "default"
    assert sources["page_size"] == "default"
    assert "max_num_seqs" in envelope.describe() and "recipe" in envelope.describe()


def test_json_round_trip_and_incomplete_json() -> None:
    envelope = make(numerics="rl-bitwise")
    again = Envelope.from_json(envelope.to_json())
    assert again.to_json() == envelope.to_json() and again.targets == V3
    assert again.required_features == {"batch_invariant", "fixed_reduction_order", "run_invariant"}
    assert envelope.settings["kernel_features"].source == "tightened" and make().required_features == frozenset()
    data = envelope.to_json()
    del data["dtype"]
    with pytest.raises(EnvelopeError, match="the stored envelope is incomplete: it lacks 'dtype'"):
        Envelope.from_json(data)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtype": "int3"}, "dtype .set by flag. is 'int3'; it must be float32 or bfloat16"),
        ({"numerics": "fast"}, "numerics .set by flag. is 'fast'; it must be one of auto, rl-bitwise"),
        ({"max_model_len": 0}, "max_model_len .set by flag. is 0; it must lie between 1 and"),
        ({"max_model_len": 8193}, "max_model_len is 8193, but the checkpoint was made for 8192 positions"),
        ({"max_num_seqs": True}, "max_num_seqs .set by flag. is True; it must be a whole number"),
        ({"max_prefill_tokens": 8}, "max_prefill_tokens is 8, but a step of max_num_seqs = 64 decodes"),
        ({"max_logit_rows": 3}, "max_logit_rows is 3; it must lie between max_num_seqs = 64"),
        ({"page_size": 48}, "page_size is 48, but it must be a multiple of 32"),
        ({"split_positions": 100}, "split_positions is 100, but it must be a multiple of page_size = 64"),
        ({"kernel_features": ["fast"]}, "kernel_features .set by flag. names 'fast'; the features are batch_invariant"),
        ({"model": " "}, "model .set by flag. is ' '; it must be a non-empty name"),
        ({"colour": 1}, "unknown envelope field 'colour' .set by flag."),
        ({"targets": ""}, "unknown target ''"),
    ],
)
def test_refusals(flags: dict[str, object], message: str) -> None:
    with pytest.raises((EnvelopeError, TargetError), match=message):
        make(**flags)


def test_targets_are_sorted_and_unique() -> None:
    envelope = make(targets="cpu:x86-64-v4,cpu:x86-64-v3, cpu:x86-64-v4")
    assert [str(t) for t in envelope.targets] == ["cpu:x86-64-v3", "cpu:x86-64-v4"]
    with pytest.raises(TargetError, match="unknown target 'tpu:v5'"):
        make(targets="tpu:v5")
    with pytest.raises(TargetError, match="unknown target 'cpu:pentium'"):
        make(targets="cpu:pentium")


def test_a_gpu_among_the_targets_changes_defaults() -> None:
    cpu, both = make(targets="cpu:x86-64-v3"), make(targets="cpu:x86-64-v3,cuda:sm_90a")
    assert (cpu.max_prefill_tokens, cpu.max_num_seqs, cpu.split_positions) == (2048, 64, 1024)
    assert (both.max_prefill_tokens, both.max_num_seqs, both.split_positions) == (8192, 256, 256)
    assert make(targets="hip:gfx950", max_num_seqs=8).max_num_seqs == 8


def test_gpu_targets() -> None:
    hopper = Target.parse("cuda:sm_90a")
    assert hopper.is_gpu and hopper.gpu.binary_suffix == "cubin" and hopper.gpu.warp_size == 32
    assert Target.parse("hip:gfx950").gpu.binary_suffix == "hsaco"
    assert hopper.covers(hopper) and not hopper.covers(V3[0]) and not V3[0].covers(hopper)
    assert not Target.parse("cuda:sm_100a").covers(hopper)
    with pytest.raises(TargetError, match="unknown target 'cuda:sm_80'") as caught:
        Target.parse("cuda:sm_80")
    assert caught.value.hint == ("use one of cuda:sm_90a, cuda:sm_100a, cuda:sm_103a, cuda:sm_120a or cpu:native")


def test_target_ladder() -> None:
    haswell = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"])
    assert [str(t) for t in runnable_targets(haswell)] == ["cpu:x86-64-v3"]
    assert runnable_targets(frozenset()) == ()
    amx = Target.parse("cpu:x86-64-v4+amx")
    assert missing_flags(amx, haswell)[:2] == ("amx_bf16", "amx_tile")
    assert amx.covers(Target.parse("cpu:x86-64-v3")) and not V3[0].covers(amx)


def test_recipe_files(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[envelope]\ndtype = "float32"\n')
    assert read_recipe(path) == {"dtype": "float32"}
    path.write_text("x = 1\n")
    with pytest.raises(EnvelopeError, match="needs exactly one table"):
        read_recipe(path)
    path.write_text("[envelope\n")
    with pytest.raises(EnvelopeError, match="is not valid TOML"):
        read_recipe(path)
    with pytest.raises(EnvelopeError, match="cannot read the recipe"):
        read_recipe(tmp_path / "absent.toml")


@pytest.mark.parametrize("name", ["dtype", "targets", "kernel_features", "numerics", "penalties", "logprob_order"])
@pytest.mark.parametrize("value", [5, True, 1.5, [[1]], {}, {"a": 1}])
def test_values_of_a_recipe_that_are_of_another_type(name: str, value: object) -> None:
    if (name, value) == ("penalties", True):
        return
    with pytest.raises(EnvelopeError, match=rf"^{name} \(set by recipe\) is .*; it must be "):
        resolve(model="m", max_position_embeddings=64, vocab_size=64, recipe={name: value}, default_targets=V3)


def test_penalties_are_on_or_off() -> None:
    def resolved(value: Any) -> Any:
        envelope = resolve(
            model="m", max_position_embeddings=64, vocab_size=64, recipe={"penalties": value}, default_targets=V3
        )
        assert Envelope.from_json(envelope.to_json()) == envelope
        return envelope

    assert resolve(model="m", max_position_embeddings=64, vocab_size=64, default_targets=V3).penalties
    assert resolved(True).penalties and resolved("on").penalties
    off = resolved("off")
    assert not off.penalties and not resolved(False).penalties
    assert re.search(r"^penalties +off +recipe ", off.describe(), re.MULTILINE)
    for wrong in ("maybe", 1, [True], None):
        with pytest.raises(EnvelopeError, match=r"penalties \(set by the artifact\) is .*; it must be on or off"):
            Envelope.from_json({**off.to_json(), "penalties": {"value": wrong, "source": "flag"}})


def test_shipped_recipes_resolve() -> None:
    recipes = sorted((Path(__file__).parent.parent / "artifacts" / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        resolve(model="m", max_position_embeddings=8192, vocab_size=64, recipe=read_recipe(path), default_targets=V3)
