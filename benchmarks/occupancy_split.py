"""Build an artifact with a deliberate fault: attention that splits by occupancy, which batch invariance forbids.

    python benchmarks/occupancy_split.py CHECKPOINT -o ARTIFACT [--few N] [--dummy-weights SEED] [NAME=VALUE ...]

NAME=VALUE are fields of the envelope, such as dtype=bfloat16 or targets=cuda:sm_90a. Buckets of more than N sequences
restart their sums twice as seldom as those of fewer: what a kernel does that chooses its splits to fill the machine.
Such an artifact must fail `tokenspeed invariance`, which must name paged_attention; the numerics mode is auto, as
rl-bitwise refuses it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the checkout, where nothing is installed

from tokenspeed.bucket import Bucket
from tokenspeed.compile import select
from tokenspeed.compile.build import build


@contextmanager
def split_by_occupancy(few: int) -> Iterator[None]:
    """While it lasts, builds split attention twice as seldom in buckets of more than ``few`` sequences."""
    honest = select._sizes_in

    def faulty(bucket: Bucket, sizes: Mapping[str, int]) -> dict[str, int]:
        found = honest(bucket, sizes)
        if "split_positions" in found and bucket.num_seqs > few:
            found["split_positions"] *= 2
        return found

    with mock.patch.object(select, "_sizes_in", faulty):
        yield


def envelope_fields(pairs: Sequence[str]) -> dict[str, Any]:
    """``["dtype=bfloat16", "max_num_seqs=8"]`` as fields of the envelope."""
    fields = dict(pair.split("=", 1) for pair in pairs)
    return {name: int(value) if value.isdecimal() else value for name, value in fields.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--few", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--dummy-weights", type=int, metavar="SEED")
    parser.add_argument("fields", nargs="*", metavar="NAME=VALUE")
    args = parser.parse_intermixed_args()
    with split_by_occupancy(args.few):
        result = build(
            args.checkpoint, args.output, force=True, dummy_weights=args.dummy_weights, **envelope_fields(args.fields)
        )  # fmt: skip
    print(result.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
