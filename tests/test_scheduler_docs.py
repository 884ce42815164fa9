"""The diagram and the table of docs/scheduler.md are those of the compiled transitions."""

from __future__ import annotations

import runpy
from pathlib import Path

from tokenspeed import _native

DIAGRAM = runpy.run_path(str(Path(__file__).resolve().parent.parent / "docs" / "state_diagram.py"))


def test_the_page_has_the_transitions_of_the_scheduler() -> None:
    page = DIAGRAM["PAGE"].read_text()
    assert page == DIAGRAM["with_transitions"](page, _native.transitions()), (
        "run `python docs/state_diagram.py --write`"
    )


def test_edges_that_differ_in_steps_are_drawn_once() -> None:
    edges = [
        ("decoding+1", "commit", "decoding"),
        ("decoding+2", "commit", "decoding+1"),
        ("waiting", "abort", "finished"),
    ]
    assert DIAGRAM["families"](edges) == {
        ("decoding", "commit", "decoding", -1): [1, 2],
        ("waiting", "abort", "finished", 0): [0],
    }
    drawn = DIAGRAM["render"](edges)
    assert "    decoding --> decoding: commit (-1 step)\n" in drawn
    assert "| decoding | 1, 2 | `commit` | decoding | 0, 1 |" in drawn
