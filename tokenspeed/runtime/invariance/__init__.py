"""The invariance harness: the same prompts in many circumstances, whose tokens and log-probabilities must be equal to
the last bit; where they are not, the first op that computes another bit; where they are, an attestation
(docs/invariance.md)."""
