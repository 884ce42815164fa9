"""Dumps of log-probabilities: what is written is read, one unit in the last place is found, and nonsense is refused."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import write_checkpoint

import tokenspeed
from tokenspeed.artifact import Artifact
from tokenspeed.cli import main
from tokenspeed.compile.build import build
from tokenspeed.errors import DumpError, RequestError, TokenSpeedError
from tokenspeed.runtime.align import check as checking
from tokenspeed.runtime.align.check import CHECKS, bits_of, check_dump, ulps_between
from tokenspeed.runtime.align.dump import Dump, Sequence, read_dump, write_dump
from tokenspeed.runtime.align.make import dump_of
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.tensor_file import read_index

PROMPTS = [[1, 2, 3, 4, 5], [9], list(range(20, 60))]
OPTIONS = LoadOptions(threads=2, kv_gib=0.02)


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with tokenspeed.load(tiny_artifact, options=OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> Dump:
    return dump_of(engine, PROMPTS, max_tokens=8, commit="abc", with_logits=True)


@pytest.fixture(scope="module")
def drawn(engine: Engine) -> Dump:
    return dump_of(engine, PROMPTS, max_tokens=8, temperature=1.0, seed=(1 << 64) - 1)


def next_up(value: float) -> float:
    """The float32 one unit in the last place further from zero."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (found,) = struct.unpack("<f", struct.pack("<I", bits + 1))
    return float(found)


def changed(dump: Dump, number: int, **fields: Any) -> Dump:
    sequences = list(dump.sequences)
    sequences[number] = replace(sequences[number], **fields)
    return replace(dump, sequences=tuple(sequences))


def verdicts(engine: Engine, dump: Dump) -> dict[str, checking.Verdict]:
    found = check_dump(engine, dump)
    assert [v.check for v in found] == [name for name in CHECKS if name in {v.check for v in found}]
    return {v.check: v for v in found}


def test_a_dump_says_what_the_engine_computes(engine: Engine, greedy: Dump, drawn: Dump) -> None:
    for dump in (greedy, drawn):
        assert all(len(s.logprob) == len(s.ids) - 1 == (s.prompt_len or 0) + 7 for s in dump.sequences)
        assert dump.artifact == dump.weights == engine.info.artifact_digest
        found = verdicts(engine, dump)
        assert all(v.passed and v.first is None for v in found.values())
        assert found["trainer"].compared == found["packed"].compared == sum(len(p) + 7 for p in PROMPTS)
        assert found["generated"].compared == found["replies"].compared == 24
    assert set(verdicts(engine, greedy)) == set(CHECKS) and greedy.commit == "abc"
    assert greedy.sequences != drawn.sequences and [s.seed for s in drawn.sequences] == [(1 << 64) - 1, 0, 1]


def test_logits_are_those_of_the_log_probabilities(engine: Engine, greedy: Dump) -> None:
    assert greedy.first_logits is not None and len(greedy.first_logits) == engine.info.vocab_size
    first = greedy.sequences[0]
    log_sum = math.log(math.fsum(map(math.exp, greedy.first_logits)))
    assert greedy.first_logits[first.ids[1]] - log_sum == pytest.approx(first.logprob[0], abs=1e-5)


def test_one_sequence_is_packed_with_its_beginnings(engine: Engine) -> None:
    dump = dump_of(engine, PROMPTS[:1], max_tokens=3)
    found = verdicts(engine, dump)
    assert found["packed"].passed and found["packed"].compared == 7


@pytest.mark.parametrize(("sequence", "position"), [(0, 1), (1, 3), (2, 47)])
def test_one_unit_in_the_last_place_is_found(engine: Engine, greedy: Dump, sequence: int, position: int) -> None:
    logprob = list(greedy.sequences[sequence].logprob)
    right = logprob[position - 1]
    logprob[position - 1] = wrong = next_up(right)
    found = verdicts(engine, changed(greedy, sequence, logprob=logprob))
    assert [name for name, v in found.items() if not v.passed] == ["trainer"]
    verdict = found["trainer"]
    assert verdict.different == 1 and verdict.largest == pytest.approx(abs(right - wrong))
    first = verdict.first
    assert first is not None and (first.sequence, first.position) == (sequence, position)
    assert first.token == greedy.sequences[sequence].ids[position] and first.ulps == 1
    assert (first.expected, first.found) == (wrong, right)
    assert (first.expected_bits, first.found_bits) == (bits_of(wrong), bits_of(right))


def test_the_first_of_many_is_told(engine: Engine, greedy: Dump) -> None:
    logprob = [value - 1 if i >= 4 else value for i, value in enumerate(greedy.sequences[1].logprob)]
    verdict = verdicts(engine, changed(greedy, 1, logprob=logprob))["trainer"]
    assert verdict.different == 4 and verdict.largest == pytest.approx(1, abs=1e-6)
    assert verdict.first is not None and (verdict.first.sequence, verdict.first.position) == (1, 5)


def test_a_logit_that_differs(engine: Engine, greedy: Dump) -> None:
    assert greedy.first_logits is not None
    logits = list(greedy.first_logits)
    logits[100] = -logits[100]
    verdict = verdicts(engine, replace(greedy, first_logits=logits))["logits"]
    assert verdict.different == 1 and verdict.first is not None and verdict.first.position == 100


def test_replies_that_the_engine_would_not_draw(engine: Engine, drawn: Dump) -> None:
    found = verdicts(engine, changed(drawn, 2, seed=12345))
    assert found["trainer"].passed and found["generated"].passed and not found["replies"].passed
    first = found["replies"].first
    assert first is not None and first.sequence == 2 and first.position >= 40 and first.expected == first.token


def test_a_trainers_dump_may_say_less(engine: Engine, greedy: Dump, drawn: Dump) -> None:
    bare = Dump(tuple(Sequence(s.ids, s.logprob) for s in drawn.sequences), commit="trainer 1")
    assert set(verdicts(engine, bare)) == {"trainer", "packed"}
    prompts = replace(bare, sequences=tuple(replace(s, seed=None) for s in drawn.sequences))
    found = verdicts(engine, prompts)  # drawn by no rule that is told: greedy replies are looked at instead
    assert set(found) == {"trainer", "packed", "generated"} and all(v.passed for v in found.values())
    whole = replace(bare, sequences=(Sequence([5], []), Sequence([5, 6], greedy.sequences[0].logprob[:1], 2)))
    assert set(verdicts(engine, whole)) == {"trainer", "packed"}


def test_sequences_as_long_as_can_be(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build(tiny_checkpoint, tmp_path / "artifact", dtype="float32", max_num_seqs=2, max_model_len=64)
    with tokenspeed.load(tmp_path / "artifact", options=LoadOptions(threads=1)) as engine:
        dump = dump_of(engine, [[1, 2, 3]], max_tokens=61)
        found = verdicts(engine, dump)
        assert found["trainer"].compared == 63 and all(v.passed for v in found.values())
        with pytest.raises(
            DumpError, match="sequence 0 has 65 tokens, and the artifact was built for max_model_len 64"
        ):
            check_dump(engine, Dump((Sequence([1] * 65, [0.0] * 64),), "c"))
        with pytest.raises(RequestError, match="does not fit"):
            dump_of(engine, [[1, 2, 3]], max_tokens=62)


def test_the_engine_against_itself(engine: Engine, greedy: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checking.teacher_force

    def shifty(engine: Engine, sequences: Any, *, together: bool) -> list[list[float]]:
        found = real(engine, sequences, together=together)
        if together:  # as if the company changed the last value of the first sequence
            found[0][-1] = next_up(found[0][-1])
        return found

    monkeypatch.setattr(checking, "teacher_force", shifty)
    found = verdicts(engine, greedy)
    assert [name for name, v in found.items() if not v.passed] == ["packed"]
    assert found["packed"].first is not None and found["packed"].first.position == 12

    def forgetful(engine: Engine, sequences: Any, *, together: bool) -> list[list[float]]:
        return [[next_up(v) for v in row] for row in real(engine, sequences, together=together)]

    monkeypatch.setattr(checking, "teacher_force", forgetful)
    found = verdicts(engine, greedy)
    assert [name for name, v in found.items() if not v.passed] == ["trainer", "generated"]
    assert found["generated"].different == 24 and found["generated"].first is not None
    assert found["generated"].first.position == 5


def test_other_weights_do_not_agree(engine: Engine, greedy: Dump, tiny_artifact: Path, tmp_path: Path) -> None:
    build(write_checkpoint(tmp_path / "c", seed=1), tmp_path / "other", dtype="float32", max_num_seqs=8)
    files = [path / Artifact.open(path).manifest.targets[0].weights for path in (tmp_path / "other", tiny_artifact)]
    try:
        engine.update_weights(files[0])
        found = verdicts(engine, greedy)
        assert not found["trainer"].passed and not found["logits"].passed and not found["replies"].passed
        assert found["packed"].passed and found["generated"].passed
    finally:
        engine.update_weights(files[1])


def test_distances() -> None:
    assert ulps_between(1.0, 1.0) == 0 and ulps_between(-1.0, next_up(-1.0)) == 1
    assert ulps_between(0.0, 2.0**-149) == 1 and ulps_between(-(2.0**-149), 2.0**-149) == 2
    assert ulps_between(math.nan, 1.0) is None and bits_of(-0.0) == "80000000"


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_hold_everything(greedy: Dump, drawn: Dump, tmp_path: Path) -> None:
    one = Dump((Sequence([1, 2], [-math.inf]),), commit="x")
    for dump in (greedy, drawn, one, replace(one, sequences=(Sequence([7], []), Sequence([8], [])))):
        write_dump(tmp_path / "d", dump)
        assert read_dump(tmp_path / "d") == dump
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]
    write_dump(tmp_path / "d", drawn)
    first = (tmp_path / "d").read_bytes()
    write_dump(tmp_path / "d", drawn)
    assert (tmp_path / "d").read_bytes() == first and read_index(tmp_path / "d").data_offset % 64 == 0
    with pytest.raises(TokenSpeedError, match=r"cannot write the dump .*No such file"):
        write_dump(tmp_path / "none" / "d", drawn)


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def retyped(name: str, dtype: str) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> None:
        size = {"I32": 4, "F64": 8, "F16": 2}[dtype]
        begin, end = header[name]["data_offsets"]
        header[name].update(dtype=dtype, shape=[(end - begin) // size])

    return change


def shortened(name: str, by: int) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> None:
        entry = header[name]
        entry["shape"][0] -= by
        entry["data_offsets"][1] -= by * {"F32": 4}.get(entry["dtype"], 8)

    return change


HOSTILE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda h: h.pop("ids"), "it has no tensor 'ids'"),
    (lambda h: h.pop("logprob"), "it has no tensor 'logprob'"),
    (lambda h: h.pop("cu_seqlens"), "its layout is 'packed', and it has no tensor 'cu_seqlens'"),
    (lambda h: h["__metadata__"].update(layout="single"), "its layout is 'single', and it has a tensor 'cu_seqlens'"),
    (lambda h: h["__metadata__"].update(layout="rows"), "its layout is 'rows'; it must be one of single, packed"),
    (lambda h: h["__metadata__"].pop("commit"), "its metadata lack 'commit'"),
    (lambda h: h.pop("__metadata__"), "its metadata lack 'commit'"),
    (lambda h: h["__metadata__"].update(temperature="warm"), "its temperature is 'warm'"),
    (lambda h: h["__metadata__"].update(temperature="nan"), "its temperature is 'nan'"),
    (lambda h: h["__metadata__"].update(temperature="1e30"), "its temperature is '1e30'"),
    (lambda h: h["logprob"].update(data_offsets=[0, 4 * 67]), "its tensors logprob and ids overlap"),
    (
        lambda h: (h["__metadata__"].update(temperature="0.5"), h.pop("seeds")),
        "temperature 0.5, and it has no tensor",
    ),
    (lambda h: h.update(more=h["ids"]), "it has a tensor 'more', which no dump has"),
    (retyped("ids", "I32"), "ids must be I64 of one dimension, not I32"),
    (retyped("logprob", "F16"), "logprob must be F32 of one dimension, not F16"),
    (lambda h: h["ids"].update(shape=[1, *h["ids"]["shape"]]), "ids must be I64 of one dimension, not I64"),
    (shortened("logprob", 1), "70 ids of 3 sequences need 67 log-probabilities, and there are 66"),
    (shortened("ids", 1), "cu_seqlens must rise from 0 to 69"),
    (shortened("cu_seqlens", 1), "cu_seqlens must rise from 0 to 70"),
    (shortened("prompt_lens", 1), "prompt_lens must have one entry for each of 3 sequences, not 2"),
    (shortened("seeds", 3), "seeds must have one entry for each of 3 sequences, not 0"),
    (lambda h: h["first_logits"].update(data_offsets=[0, 1 << 40], shape=[1 << 38]), "it is cut short"),
]


@pytest.mark.parametrize(("change", "text"), HOSTILE, ids=lambda v: v[:30] if isinstance(v, str) else "")
def test_damaged_dumps(greedy: Dump, tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str) -> None:
    path = tmp_path / "d"
    write_dump(path, greedy)
    rewritten(path, change)
    with pytest.raises(DumpError, match=text):
        read_dump(path)


def test_files_that_are_none(greedy: Dump, tmp_path: Path) -> None:
    path = tmp_path / "d"
    for content, text in [
        (b"", "it has 0 bytes"),
        (b"hello" * 9, "no safetensors file"),
        (b"\2" + bytes(9), "its header"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DumpError, match=text):
            read_dump(path)
    write_dump(path, greedy)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DumpError, match="it is cut short: tensor"):
        read_dump(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DumpError, match="it is no ordinary file"):  # at once, though nobody writes to it
        read_dump(tmp_path / "pipe")
    with pytest.raises(DumpError, match=r"cannot read the dump .*No such file"):
        read_dump(tmp_path / "none")
    for bad, text in [
        (changed(greedy, 0, prompt_len=99), "sequence 0 has 13 tokens, and a prompt of 99"),
        (changed(greedy, 1, prompt_len=0), "sequence 1 has 9 tokens, and a prompt of 0"),
        (changed(greedy, 0, logprob=[math.nan] * 12), "logprob has a NaN"),
        (Dump((Sequence([], []),), "c"), "it has no token"),
        (Dump((Sequence([1], []), Sequence([], [])), "c"), "cu_seqlens must rise from 0 to 1"),
    ]:
        write_dump(path, bad)
        with pytest.raises(DumpError, match=text):
            read_dump(path)


def test_dumps_of_another_model(engine: Engine, greedy: Dump) -> None:
    for token in (-1, 283):
        ids = [*greedy.sequences[1].ids[:-1], token]
        with pytest.raises(
            DumpError, match=f"token 8 of sequence 1 is {token}: token ids of this artifact go from 0 to"
        ):
            check_dump(engine, changed(greedy, 1, ids=ids))
    assert greedy.first_logits is not None
    with pytest.raises(DumpError, match="first_logits has 284 values, and the artifact's vocabulary 283"):
        check_dump(engine, replace(greedy, first_logits=[*greedy.first_logits, 0.0]))
    with pytest.raises(DumpError, match="there is nothing to compare: no sequence has a second token"):
        check_dump(engine, Dump((Sequence([5], []), Sequence([6], [])), "c"))


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_command_line(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "p", str(tmp_path / "d")
    prompts.write_text("[1, 2, 3]\nhello world\n")
    load = ["--threads", "2", "--kv-gib", "0.02"]
    dump = ["align", "dump", str(tiny_artifact), "-o", out, "--max-tokens", "4", *load]
    check = ["align", "check", str(tiny_artifact), out, *load]
    assert main([*dump, "--prompt-file", str(prompts), "--temperature", "0.7", "--seed", "5"]) == 0
    assert main(check) == 0
    text = capsys.readouterr().out
    assert "2 sequences" in text and "equal" in text and "differ" not in text
    assert main([*dump, "--ids", "1,2"]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*dump, "--ids", "1,2", "--force", "--first-logits", "--json", "--commit", "me"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 6
    read = read_dump(out)
    write_dump(out, changed(read, 0, logprob=[*read.sequences[0].logprob[:2], next_up(read.sequences[0].logprob[2]),
                                              *read.sequences[0].logprob[3:]]))  # fmt: skip
    assert main([*check, "--json"]) == 12
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and [c["check"] for c in found["dumps"][0]["checks"] if not c["passed"]] == ["trainer"]
    first = found["dumps"][0]["checks"][0]["first"]
    assert (first["position"], first["ulps"]) == (3, 1) and found["dumps"][0]["commit"] == "me"
    assert main(check) == 12
    text = capsys.readouterr().out
    assert "first: sequence 0, position 3, token" in text and "1 ulp away" in text and "1 differ" in text


def test_texts_of_a_dump_do_not_steer_the_terminal(
    greedy: Dump, tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(tmp_path / "d", replace(greedy, commit="\x1b[2Jme\n", artifact="\x1b]0;"))
    assert main(["align", "check", str(tiny_artifact), str(tmp_path / "d"), "--threads", "1", "--kv-gib", "0.02"]) == 0
    text = capsys.readouterr().out
    assert "made by ?[2Jme?\n" in text and "the artifact ?]0;, this" in text and "\x1b" not in text


def test_the_command_line_refuses(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d").write_bytes(b"nothing")
    assert main(["align", "check", str(tiny_artifact), str(tmp_path / "d")]) == 13
    assert "is damaged, or none" in capsys.readouterr().err
    out = ["-o", str(tmp_path / "new"), "--threads", "1", "--kv-gib", "0.02"]
    assert main(["align", "dump", str(tiny_artifact), "--ids", "1,x", *out]) == 2
    assert "--ids is '1,x'" in capsys.readouterr().err
    assert main(["align", "dump", str(tiny_artifact), "--ids", "999", *out]) == 1
    assert "prompt token 0 is 999" in capsys.readouterr().err
    weights = str(tmp_path / "d")
    assert main(["align", "dump", str(tiny_artifact), "--ids", "1", "--weights", weights, *out]) == 1
    assert "no safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
