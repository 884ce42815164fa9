"""JSON files of a checkpoint, with typed look-up whose errors name the file, the key and what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it cannot be read or holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError also covers bad UTF-8
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint="fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: need a JSON object, have {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Fields:
    """Typed access to one JSON object. A null counts as absent; ``default`` None makes a key required."""

    values: Mapping[str, Any]
    path: Path
    prefix: str = ""

    def _get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        # bool is an int to Python, but not to a reader of config files.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise CheckpointError(f"{self.path}: need {what} as {self.prefix}{key}, have {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, (int,), "an integer", default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), "a number", default))

    def boolean(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, (bool,), "true or false", default)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """One integer or a list of them; absent is empty."""
        value = self._get(key, (int, list), "an integer or a list of integers", [])
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise CheckpointError(f"{self.path}: need token ids as {self.prefix}{key}, have {value!r}")
        return tuple(items)
