"""Tables: results merged into what builds read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tuning_gpu import FAST, HOPPER, SLOW, outcomes, speed

from tokenspeed.compile.tuning_tables import merge, read_table
from tokenspeed.errors import ArtifactError
from tokenspeed.kernels.triton import linear_config
from tokenspeed.kernels.triton.linear_config import choose, to_json
from tokenspeed.target import Target


def write_results(packed: Path, path: Path, *, date: str = "2026-11-29", **changes: Any) -> Path:
    _, results = outcomes(packed)
    path.write_text(json.dumps({**results.to_json(), "date": date, **changes}))
    return path


def test_builds_use_what_was_measured(packed: Path, tmp_path: Path, tables: Path) -> None:
    """From the pack to the choice of a build."""
    speed(packed, FAST, 4.0)
    (merged,) = merge([write_results(packed, tmp_path / "r.json")])
    assert (merged.target, merged.path) == ("cuda:sm_90a", tables / "sm_90a.json")
    assert (merged.added, merged.replaced, merged.kept, merged.total) == (4, 0, 0, 4)
    for m in (1, 7, 512, 9000):
        assert choose(HOPPER, "linear_add", m, 64, 96, "bfloat16") == FAST
    entries = read_table(HOPPER)["linear"]
    first = entries[0]
    bound = (2 * 64 * 65 + 8 * 64) / 4.8e12
    assert first == {
        "op": "linear_add", "N": 64, "K": 64, "M": 1, "dtype": "bfloat16", "us": 4.0, "config": to_json(FAST),
        "runner_up": {"us": pytest.approx(10, rel=0.01), "config": to_json(SLOW)},
        "bound": "read", "share": round(bound * 1e6 / 4, 3), "share_of": "H200 SXM",
        "device": "NVIDIA H200", "date": "2026-11-29",
    }  # fmt: skip
    assert [(e["K"], e["M"]) for e in entries] == [(64, 1), (64, 512), (96, 1), (96, 512)]


def test_later_measurements_replace_earlier_ones_of_their_device(packed: Path, tmp_path: Path, tables: Path) -> None:
    old = write_results(packed, tmp_path / "old.json", date="2026-11-01")
    speed(packed, FAST, 4.0)
    new = write_results(packed, tmp_path / "new.json", date="2026-11-20")
    other = write_results(packed, tmp_path / "other.json", date="2026-11-10", device="NVIDIA H100")
    merge([new])
    text = (tables / "sm_90a.json").read_text()
    (merged,) = merge([old])
    assert (merged.added, merged.replaced, merged.kept) == (0, 0, 4)
    assert (tables / "sm_90a.json").read_text() == text
    (merged,) = merge([other, new])
    assert (merged.added, merged.replaced, merged.total) == (4, 4, 8)
    assert [e["device"] for e in read_table(HOPPER)["linear"]] == ["NVIDIA H100", "NVIDIA H200"] * 4
    first = tmp_path / "first"
    for order in ([old, other, new], [new, other, old]):
        merge(order, tmp_path / str(len(first.name)))
        assert (tmp_path / str(len(first.name)) / "sm_90a.json").read_text() == (tables / "sm_90a.json").read_text()
    assert choose(HOPPER, "linear_add", 1, 64, 64, "bfloat16") == FAST  # of the two devices', what was measured last


BAD: dict[str, Any] = {
    "it does not say that it is one": lambda raw: raw.update(kind="a diary"),
    "it has format version 7": lambda raw: raw.update(format_version=7),
    "it has no 'target'": lambda raw: raw.pop("target"),
    "its target is cpu": lambda raw: raw.update(target="cpu:x86-64-v3"),
    "date is 'soon'": lambda raw: raw.update(date="soon"),
    "no table has a list 'norms'": lambda raw: raw["entries"][0].update(family="norms"),
    "M is 0": lambda raw: raw["entries"][0].update(M=0),
    "a call took 0 us": lambda raw: raw["entries"][0]["timed"][0].update(us=0),
    "num_warps is 'many'": lambda raw: raw["entries"][0]["timed"][1]["config"].update(num_warps="many"),
    "unexpected keyword": lambda raw: raw["entries"][0]["timed"][1]["config"].update(colour=1),
    "does not fit cuda:sm_90a": lambda raw: raw["entries"][0]["timed"][0]["config"].update(block_k=8192),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_result_is_refused_and_changes_nothing(
    packed: Path, tmp_path: Path, tables: Path, message: str
) -> None:
    good = write_results(packed, tmp_path / "good.json")
    raw = json.loads(good.read_text())
    BAD[message](raw)
    (tmp_path / "bad.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=message):
        merge([good, tmp_path / "bad.json"])
    assert not tables.exists()


def test_a_file_of_another_kind_is_named(packed: Path, tmp_path: Path, tables: Path) -> None:
    with pytest.raises(ArtifactError, match="is a pack: need results") as caught:
        merge([packed])
    assert caught.value.hint is not None and f"tokenspeed tune run {packed} -o RESULTS.json" in caught.value.hint
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="x holds no results of `tokenspeed tune run`: it is no text") as caught:
        merge([tmp_path / "x"])
    assert caught.value.hint == "give it what `-o` of a run wrote"
    assert not tables.exists()


def test_a_table_that_cannot_be_read(packed: Path, tmp_path: Path, tables: Path) -> None:
    good = write_results(packed, tmp_path / "good.json")
    tables.mkdir()
    for text in ("{", '{"format_version": 9}', '{"format_version": 1, "linear": [{"op": "linear"}]}'):
        (tables / "sm_90a.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"sm_90a\.json is no tuning table"):
            merge([good])
        assert (tables / "sm_90a.json").read_text() == text


def test_the_tables_of_this_version_can_be_read() -> None:
    paths = [path for path in linear_config.TUNING_FOLDER.glob("*.json") if ".classes." not in path.name]
    assert paths
    for path in paths:
        assert read_table(Target("cuda", path.stem))["linear"]
