"""However a program ends, no thread is left inside the native module."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from tiny_artifact import cli_environment

from tokenspeed.runtime.loader import _Background

UNCLOSED = """
import sys, time, tokenspeed
engine = tokenspeed.load(sys.argv[1])
params = tokenspeed.SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0)
for i in range(16):
    engine.submit([1, 2, 3 + i], params, lambda event: None)
while engine.stats().steps < 3:
    time.sleep(0.001)
print("leaving")
"""


def test_a_program_may_end_without_closing(tiny_artifact: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(tiny_artifact)], env=cli_environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_background_work_is_waited_for_wherever_it_starts() -> None:
    """A daemon thread's children are daemons unless told otherwise, and the interpreter would end without them."""
    made: list[_Background] = []
    starter = threading.Thread(target=lambda: made.append(_Background("work", lambda: None)), daemon=True)
    starter.start()
    starter.join()
    assert not made[0]._thread.daemon
    made[0].result()
