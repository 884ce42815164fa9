"""Draws the diagram and the table of docs/scheduler.md from the transitions that the C++ scheduler was compiled with.

    python docs/state_diagram.py        print them
    python docs/state_diagram.py --write    put them into docs/scheduler.md

States are phases with a number of planned steps that use the request: ``decoding+2``. An edge that is there for several
numbers is drawn once. A test keeps the page equal to what this prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "scheduler.md"
BEGIN, END = "<!-- transitions: made by docs/state_diagram.py -->\n", "<!-- end of transitions -->\n"

Edge = tuple[str, str, str]


def _parts(state: str) -> tuple[str, int]:
    phase, _, steps = state.partition("+")
    return phase, int(steps or 0)


def families(edges: Iterable[Edge]) -> dict[tuple[str, str, str, int], list[int]]:
    """Edges that differ only in the number of steps: (phase, event, next phase, steps gained) -> steps before."""
    found: dict[tuple[str, str, str, int], list[int]] = {}
    for before, event, after in edges:
        (phase, steps), (following, left) = _parts(before), _parts(after)
        found.setdefault((phase, event, following, left - steps), []).append(steps)
    return found


def render(edges: Iterable[Edge]) -> str:
    """The mermaid diagram of phases, then the table of all edges."""
    rows = families(edges)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> waiting: submit"]
    seen: dict[tuple[str, str], list[str]] = {}
    for phase, event, following, gained in rows:
        label = event + (f" ({gained:+d} step)" if gained in (1, -1) else "")
        labels = seen.setdefault((phase, following), [])
        if label not in labels:
            labels.append(label)
    lines += [f"    {phase} --> {following}: {', '.join(labels)}" for (phase, following), labels in seen.items()]
    lines += ["    finished --> [*]", "```", ""]
    lines += ["| phase | steps in flight | event | becomes | steps then |", "|---|---|---|---|---|"]
    for (phase, event, following, gained), steps in rows.items():
        then = [n + gained for n in steps]
        lines.append(f"| {phase} | {_numbers(steps)} | `{event}` | {following} | {_numbers(then)} |")
    return "\n".join(lines) + "\n"


def _numbers(steps: list[int]) -> str:
    return ", ".join(str(n) for n in steps)


def with_transitions(page: str, edges: Iterable[Edge]) -> str:
    """``page`` with what is between its two markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + render(edges) + END + after


def main() -> int:
    sys.path.insert(0, str(PAGE.parent.parent))
    from tokenspeed import _native

    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_transitions(PAGE.read_text(), _native.transitions()))
    else:
        sys.stdout.write(render(_native.transitions()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
