"""A trainer's log-probabilities held against the engine's, bit for bit: dumps, and what checks them (docs/align.md)."""
