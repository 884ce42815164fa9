"""Measuring: which candidate is fastest, which are out, and on which GPU."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from gpu_double import H200
from tuning_gpu import BEFORE_US, FAST, HOPPER, SLOW, WRONG, FakeGpu, binaries, outcomes, plug_in, speed

from tokenspeed.errors import ArtifactError, ResourceError, UsageError
from tokenspeed.kernels.triton.linear_config import Config, to_json
from tokenspeed.runtime.pack_device import find_gpu
from tokenspeed.runtime.tuning import ROUNDS, filling
from tokenspeed.target import Target
from tokenspeed.tuning_pack import MADE_BY

# ---- measuring ------------------------------------------------------------------------------------------------


def test_the_fastest_comes_first_without_what_came_before(packed: Path) -> None:
    speed(packed, FAST, 4.0)
    speed(packed, WRONG, 5.0)
    found, results = outcomes(packed)
    assert len(FakeGpu.made) == 2 and results.skipped == []
    assert [(o.shape.key["K"], o.case.rows) for o in found] == [(64, 1), (64, 512), (96, 1), (96, 512)]
    for outcome in found:
        assert [t.config for t in outcome.timed] == [to_json(c) for c in (FAST, WRONG, SLOW)] and not outcome.excluded
        assert [t.us for t in outcome.timed] == pytest.approx([4, 5, 10], rel=3e-3)
        assert outcome.before_us == pytest.approx(BEFORE_US if outcome.case.rows == 1 else 0, rel=3e-3)
        assert 0 < outcome.timed[0].spread < 0.003
        assert outcome.replays == 4 * ROUNDS


def test_slow_candidates_leave_the_race(packed: Path) -> None:
    speed(packed, FAST, 4.0)
    speed(packed, WRONG, 4.1)
    outcomes(packed)
    few = sum(device.tickets for device in FakeGpu.made)
    FakeGpu.made.clear()
    speed(packed, SLOW, 4.05)
    outcomes(packed)
    assert sum(device.tickets for device in FakeGpu.made) == few + 4 * (ROUNDS - 1) * 5  # 4 cases, turns of 5 replays


def test_other_bits_are_out(packed: Path) -> None:
    FakeGpu.wrong = binaries(packed, WRONG)
    speed(packed, WRONG, 0.5)
    for outcome in outcomes(packed)[0]:
        assert [t.config for t in outcome.timed] == [to_json(SLOW), to_json(FAST)]
        assert outcome.excluded == ((to_json(WRONG), "its result has other bits than that of 2 others"),)


def test_the_first_may_be_the_wrong_one(packed: Path) -> None:
    FakeGpu.wrong = binaries(packed, SLOW)
    for outcome in outcomes(packed)[0]:
        assert {str(t.config) for t in outcome.timed} == {str(to_json(FAST)), str(to_json(WRONG))}
        assert [config for config, _ in outcome.excluded] == [to_json(SLOW)]


@pytest.mark.parametrize("idle", [[SLOW], [FAST], [SLOW, FAST, WRONG]], ids=["first", "second", "all"])
def test_kernels_that_write_nothing_are_out(packed: Path, idle: list[Config]) -> None:
    for config in idle:
        FakeGpu.lazy |= binaries(packed, config)
        speed(packed, config, 0.1)
    for outcome in outcomes(packed)[0]:
        assert [config for config, _ in outcome.excluded] == [to_json(config) for config in idle]
        assert {reason for _, reason in outcome.excluded} == {"it leaves the result of the call before it"}
        assert len(outcome.timed) == 3 - len(idle)


def test_what_the_driver_refuses_is_out(packed: Path) -> None:
    FakeGpu.broken = binaries(packed, FAST)
    for outcome in outcomes(packed)[0]:
        assert outcome.excluded == ((to_json(FAST), "it cannot be loaded: node 0: too much shared memory"),)
        assert len(outcome.timed) == 2


def test_time_is_shared_and_what_it_does_not_reach_is_skipped(packed: Path) -> None:
    found, _ = outcomes(packed)
    whole = FakeGpu.clock
    FakeGpu.clock = 0.0
    found, results = outcomes(packed, seconds=whole / 2)
    assert len(found) == 4 and not results.skipped
    assert all(4 <= outcome.replays < 4 * ROUNDS for outcome in found) and FakeGpu.clock < 0.8 * whole
    FakeGpu.clock = 0.0
    found, results = outcomes(packed, seconds=whole / 100)
    assert len(found) == 1
    assert results.skipped == [
        f"linear_add N=64 {case}" for case in ("K=64 bfloat16 M=512", "K=96 bfloat16 M=1", "K=96 bfloat16 M=512")
    ]  # fmt: skip


def test_matrices_hold_sane_numbers_that_do_not_repeat() -> None:
    block = filling()
    assert len(block) % 2 == 0 and math.gcd(len(block), 4096) == 2
    for (half,) in struct.iter_unpack("<H", block[:100000]):
        (value,) = struct.unpack("<f", struct.pack("<I", half << 16))
        assert 2**-7 <= abs(value) < 0.5
    assert {block[i : i + 4096] for i in range(0, 1 << 20, 4096)}.__len__() == 256
    assert filling() == block


# ---- which GPU ------------------------------------------------------------------------------------------------


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError) as caught:
        find_gpu(Target.parse("cuda:sm_100a"), None, MADE_BY)
    assert caught.value.message == "the pack is for cuda:sm_100a; GPU 0 is NVIDIA H200, sm_90"
    assert caught.value.hint == "make one with `tokenspeed tune pack --target cuda:sm_90a`"
    b200 = (1, "NVIDIA B200", "sm_100", 180 << 30, 13000)
    plug_in(monkeypatch, H200, b200)
    assert find_gpu(Target.parse("cuda:sm_100a"), None, MADE_BY).ordinal == 1
    assert find_gpu(HOPPER, 0, MADE_BY).name == "NVIDIA H200"
    with pytest.raises(ArtifactError, match="the pack is for cuda:sm_90a; "):
        find_gpu(HOPPER, 1, MADE_BY)
    with pytest.raises(UsageError, match=r"there is no GPU 2: GPU 0 is NVIDIA H200, sm_90, GPU 1"):
        find_gpu(HOPPER, 2, MADE_BY)


def test_no_gpu_and_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, (*H200[:4], 12020))
    with pytest.raises(ResourceError, match=r"needs a driver of CUDA 12\.8 or later; GPU 0 .* has one of CUDA 12\.2"):
        find_gpu(HOPPER, None, MADE_BY)
    plug_in(monkeypatch, reason="no NVIDIA driver is installed")
    with pytest.raises(ResourceError, match="no GPU was found: no NVIDIA driver is installed"):
        find_gpu(HOPPER, None, MADE_BY)
