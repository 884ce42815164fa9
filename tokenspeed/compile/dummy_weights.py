"""Checkpoints without weights: a config.json, and random numbers where its tensors would be.

``tokenspeed build --dummy-weights SEED`` reads one, so that a model's shape can be measured without its
weights. A tensor depends on the seed and its name alone: not on the number of threads, nor on what was read before.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from statistics import NormalDist
from string import ascii_letters
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tokenspeed.compile import tokenizer_hf
from tokenspeed.compile.checkpoint import BFLOAT16, ModelConfig, TensorInfo, file_digest, tensor_shapes
from tokenspeed.compile.checkpoint_hf import read_config
from tokenspeed.compile.tokenizer import TokenizerFiles
from tokenspeed.errors import CheckpointError, UsageError

STANDARD_DEVIATION = 0.02
"""Of every weight: matrices around 0, norm weights around 1."""
_BLOCK = 1 << 20
"""Elements that one generator makes."""
_GENERATOR = "sfc64, 16 bits a weight, normal quantiles in bfloat16"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class DummyCheckpoint:
    """See ``checkpoint.Checkpoint``.

    Args:
        directory: holds config.json, and tokenizer files if there are any; other files are not read.
        seed: which random weights; 0 or more.

    Raises:
        CheckpointError: there is no config.json, or none that is supported. UsageError: a negative seed.
    """

    def __init__(self, directory: str | Path, seed: int):
        self._directory = Path(directory)
        if seed < 0:
            raise UsageError(f"--dummy-weights is {seed}; it must be 0 or more")
        if not (self._directory / "config.json").is_file():
            raise CheckpointError(
                f"{self._directory} has no shape for dummy weights: need a directory with config.json",
                hint="artifacts/recipes/shapes/ has examples",
            )
        self._seed = seed
        self.config = read_config(self._directory)
        self._shapes = tensor_shapes(self.config)

    @property
    def files(self) -> tuple[Path, ...]:
        names = ("config.json", "generation_config.json", *tokenizer_hf.FILES)
        return tuple(sorted(path for name in names if (path := self._directory / name).is_file()))

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(BFLOAT16, self._shapes[name])

    def read(self, name: str) -> NDArray[Any]:
        """bfloat16, drawn from a normal distribution; its tails end at 4.3 standard deviations."""
        shape = self._shapes[name]
        return random_weights(self._seed, name, math.prod(shape), mean=float(len(shape) == 1)).reshape(shape)

    def tokenizer(self) -> TokenizerFiles:
        """The directory's, or a made-up one if it has none."""
        if any((self._directory / name).is_file() for name in _TOKENIZERS):
            return tokenizer_hf.read_tokenizer(self._directory, self.config)
        return made_up_tokenizer(self.config)

    def digests(self) -> dict[str, str]:
        return dict(self._digests)

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Of the files; and of what the weights are made from, which stands for them."""
        made = f"{_GENERATOR}, standard deviation {STANDARD_DEVIATION}, seed {self._seed}"
        digest = hashlib.sha256(made.encode()).hexdigest()
        return {**{path.name: file_digest(path) for path in self.files}, "dummy-weights": f"sha256:{digest}"}


def random_weights(seed: int, name: str, count: int, *, mean: float) -> NDArray[Any]:
    """``count`` bfloat16 numbers for the tensor ``name``, made by all processors that this process may use."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16])
    table = _quantiles(mean)
    out = np.empty(count, np.uint16)

    def fill(block: int) -> None:
        part = out[block * _BLOCK : (block + 1) * _BLOCK]
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, key, block))))
        # All 64 bits of every draw, so these are the generator's own numbers in every version of NumPy.
        bits = generator.integers(0, 1 << 64, -(-len(part) // 4), np.uint64).astype("<u8", copy=False).view("<u2")
        np.take(table, bits[: len(part)], out=part, mode="wrap")

    blocks = range(-(-count // _BLOCK))
    if len(blocks) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(min(len(blocks), len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(fill, blocks))
    return out.view(BFLOAT16)


@cache
def _quantiles(mean: float) -> NDArray[np.uint16]:
    """65536 equally likely numbers of a normal distribution, as the bits of bfloat16."""
    quantile: Callable[[float], float] = NormalDist(mean, STANDARD_DEVIATION).inv_cdf
    numbers = np.array([quantile((i + 0.5) / 65536) for i in range(65536)])
    return numbers.astype(np.float32).astype(BFLOAT16).view(np.uint16)


def made_up_tokenizer(config: ModelConfig) -> TokenizerFiles:
    """A tokenizer for a model that has none, as large as its vocabulary: every single byte, then pairs and triples of
    letters with the merges that make them, at the ids that the config's begin and end tokens leave free.

    Raises CheckpointError for a vocabulary without room for 256 bytes.
    """
    special = {token_id: f"<|end_{token_id}|>" for token_id in config.eos_token_ids}
    if config.bos_token_id is not None:
        special[config.bos_token_id] = "<|begin|>"
    free = [token_id for token_id in range(config.vocab_size) if token_id not in special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if len(free) < len(alphabet):
        raise CheckpointError(
            f"no tokenizer can be made up for {config.vocab_size} tokens, {len(special)} of them special: "
            "need 256 for the bytes",
            hint="put a tokenizer.json beside config.json",
        )
    pairs = list(product(ascii_letters, ascii_letters))
    merges = [*pairs, *((a + b, c) for (a, b), c in product(pairs, ascii_letters))][: len(free) - len(alphabet)]
    vocabulary = dict(zip([*alphabet, *(a + b for a, b in merges)], free, strict=False))
    vocabulary |= {text: token_id for token_id, text in special.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    bos = None if config.bos_token_id is None else special[config.bos_token_id]
    if bos is not None:
        named = [(bos, config.bos_token_id)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=named)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(pretty=False).encode(),
        chat_template=_CHAT_TEMPLATE,
        bos_token=bos,
        eos_token=special[config.eos_token_ids[0]] if config.eos_token_ids else None,
        pad_token=None,
        unk_token=None,
        eos_token_ids=config.eos_token_ids,
        add_bos=bos is not None,
    )
