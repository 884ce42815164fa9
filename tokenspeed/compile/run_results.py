"""Results of a run of a pack, as the makers of tables (tuning_tables.py, class_tables.py) read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenspeed import json_check
from tokenspeed.errors import ArtifactError, TargetError
from tokenspeed.target import GPU_TARGETS, Target

_ZIP = b"PK\x03\x04"  # how packs begin
_RUN = {"format_version?": int, "target?": str, "device?": str, "date?": str}
_Found = TypeVar("_Found")


def read_run(
    path: Path, command: str, kind: str, version: int, parse: Callable[[Mapping[str, Any], Target], _Found]
) -> tuple[Target, _Found]:
    """(target, what ``parse`` makes of it) of the results of ``command`` at ``path``.

    Args:
        command: what made them, e.g. "tokenspeed tune run".
        kind, version: what the file says that it is.
        parse: takes the object in the file and its target. What it raises for results that make no sense (ValueError,
            KeyError, TypeError, AttributeError) becomes an ArtifactError.

    Raises ArtifactError.
    """
    try:
        data = path.read_bytes()
        if data.startswith(_ZIP):
            raise ArtifactError(
                f"{path} is a pack: need results, the JSON file that `{command}` writes",
                hint=f"run the pack on a GPU with `{command} {path} -o RESULTS.json`, and merge those",
            )
        raw = json_check.parse(data)
        if not isinstance(raw, dict) or raw.get("kind") != kind:
            raise ValueError("it does not say that it is one")
        json_check.check(raw, _RUN)
        if raw["format_version"] != version:
            raise ValueError(f"it has format version {raw['format_version']}, this TokenSpeed reads {version}")
        target = Target.parse(raw["target"])
        if str(target) not in GPU_TARGETS:
            raise ValueError(f"its target is {target}")
        for name, good in (("device", raw["device"] != ""), ("date", is_date(raw["date"]))):
            if not good:
                raise ValueError(f"{name} is {raw[name]!r}")
        return target, parse(raw, target)
    except OSError as e:
        raise ArtifactError(
            f"cannot read {path}: {e.strerror or e}", hint=f"give it what `-o` of `{command}` wrote"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, TargetError, RecursionError) as e:
        reason = f"it has no {e}" if isinstance(e, KeyError) else str(e)
        reason = "it is no text" if isinstance(e, UnicodeDecodeError) else reason
        raise ArtifactError(
            f"{path} holds no results of `{command}`: {reason}", hint="give it what `-o` of a run wrote"
        ) from None


def is_date(value: Any) -> bool:
    """Whether it is a text like 2026-11-30."""
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None
