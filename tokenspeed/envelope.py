"""The envelope: what a deployment promises. It resolves once, at build; the runtime reads the result.

Every field is a Setting that knows who decided it: a default, the checkpoint, a recipe, a flag, or the
numerics mode tightening it. What an artifact was not built for is refused, never served wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenspeed import switches
from tokenspeed.errors import EnvelopeError
from tokenspeed.switches import KERNEL_FEATURES, NUMERICS, RL_SOLUTION, SWITCHES
from tokenspeed.target import Target

SOURCES = ("default", "checkpoint", "recipe", "flag", "tightened")
DTYPES: Mapping[str, str] = MappingProxyType({
    "float32": "float32", "fp32": "float32", "f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
})  # fmt: skip
_SWITCH: Mapping[object, bool] = MappingProxyType({True: True, False: False, "on": True, "off": False})


@dataclass(frozen=True)
class Field:
    """One field of the envelope: its default (None: derived), what it promises, a range for integers, and the
    default of an artifact with a GPU among its targets, where that differs."""

    name: str
    default: Any
    doc: str
    low: int | None = None
    high: int | None = None
    gpu_default: Any = None

    def default_for(self, targets: tuple[Target, ...]) -> Any:
        return self.gpu_default if self.gpu_default and any(t.is_gpu for t in targets) else self.default


FIELDS: tuple[Field, ...] = (
    Field("model", None, "name that the server answers to"),
    Field("dtype", "bfloat16", "dtype of weights, activations and KV pages: float32 or bfloat16"),
    Field("numerics", "auto", "auto: the fastest kernels; rl-bitwise: equal bits, by the switches below"),
    Field("max_model_len", None, "longest context in tokens, prompt and output together", 1, 1 << 24),
    Field("max_num_seqs", 64, "most sequences that run at once", 1, 4096, 256),
    Field("max_prefill_tokens", 2048, "most tokens in one step, prefill chunks and decodes together", 1, 65536, 8192),
    Field("max_logit_rows", None, "most rows of logits in one step (default: max_num_seqs)", 1, 65536),
    Field("page_size", 64, "positions in one KV page; a multiple of 32", 32, 256),
    Field("split_positions", 1024, "attention restarts its sums at every multiple of this position", 32, 1 << 24, 256),
    Field("penalties", True, "repetition, presence and frequency penalties: tokens of running sequences are counted"),
    Field("kernel_features", (), "features that every selected kernel must declare"),
    Field("targets", None, "machines that the artifact runs on"),
    *(Field(s.name, s.default, s.doc, *((1, 1024) if s.name == "logprob_shards" else ())) for s in SWITCHES),
)
_BY_NAME: Mapping[str, Field] = MappingProxyType({field.name: field for field in FIELDS})


@dataclass(frozen=True)
class Setting:
    """A resolved value and who set it (one of SOURCES)."""

    value: Any
    source: str


@dataclass(frozen=True)
class Envelope:
    """The resolved promise. Read fields as attributes (``envelope.max_model_len``)."""

    settings: Mapping[str, Setting]

    @property
    def model(self) -> str:
        return str(self.settings["model"].value)

    @property
    def dtype(self) -> str:
        return str(self.settings["dtype"].value)

    @property
    def numerics(self) -> str:
        return str(self.settings["numerics"].value)

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(Target.parse(t) for t in self.settings["targets"].value)

    def _int(self, name: str) -> int:
        return int(self.settings[name].value)

    @property
    def max_model_len(self) -> int:
        return self._int("max_model_len")

    @property
    def max_num_seqs(self) -> int:
        return self._int("max_num_seqs")

    @property
    def max_prefill_tokens(self) -> int:
        return self._int("max_prefill_tokens")

    @property
    def max_logit_rows(self) -> int:
        return self._int("max_logit_rows")

    @property
    def page_size(self) -> int:
        return self._int("page_size")

    @property
    def split_positions(self) -> int:
        return self._int("split_positions")

    @property
    def penalties(self) -> bool:
        return bool(self.settings["penalties"].value)

    @property
    def pages_per_seq(self) -> int:
        """KV pages that a sequence of max_model_len positions holds."""
        return -(-self.max_model_len // self.page_size)

    @property
    def required_features(self) -> frozenset[str]:
        """Features that every selected kernel must declare."""
        return frozenset(self.settings["kernel_features"].value)

    @property
    def op_features(self) -> dict[str, frozenset[str]]:
        """Features that the kernels of some kinds of op must declare besides."""
        on = [switch for switch in SWITCHES if self.switch(switch.name) is True]
        return {op: frozenset(features) for switch in on for op, features in switch.op_features}

    @property
    def pinned_solution(self) -> str | None:
        """The only solution allowed at any selection point, or None."""
        return RL_SOLUTION if self.numerics == "rl-bitwise" else None

    def switch(self, name: str) -> Any:
        """The value of a numerics switch."""
        return self.settings[name].value

    def to_json(self) -> dict[str, Any]:
        return {f.name: {"value": _plain(self.settings[f.name].value), "source": self.settings[f.name].source}
                for f in FIELDS}  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Envelope:
        """Read back what ``to_json`` wrote. Raises EnvelopeError on anything else."""
        try:
            settings = {
                f.name: Setting(_check(f, data[f.name]["value"], "the artifact"), _source(f, data[f.name]["source"]))
                for f in FIELDS
            }
        except (KeyError, TypeError) as e:
            raise EnvelopeError(f"the stored envelope is incomplete: it lacks {e}") from None
        return cls(MappingProxyType(settings))

    def describe(self, *, tree: bool = True) -> str:
        """One line a field: value, who set it, what it promises; then the tree of numerics switches, or, without
        ``tree``, one line of those that are not at their defaults."""
        plain = [f for f in FIELDS if f.name not in switches.BY_NAME and f.name != "numerics"]
        rows = [
            (f.name, switches.shown(self.settings[f.name].value), self.settings[f.name].source, f.doc) for f in plain
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        fields = "\n".join(
            f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source:<{widths[2]}}  {doc}"
            for name, value, source, doc in rows
        )
        values = {name: setting.value for name, setting in self.settings.items()}
        sources = {name: setting.source for name, setting in self.settings.items()}
        told = switches.describe if tree else switches.summary
        return f"{fields}\n\n{told(values, sources, self.numerics)}"


def read_recipe(path: Path) -> dict[str, Any]:
    """The ``[envelope]`` table of a recipe, a TOML file. Raises EnvelopeError if it cannot be read."""
    import tomllib  # only builds read recipes: a server that starts does without the import

    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise EnvelopeError(f"cannot read the recipe {path}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise EnvelopeError(f"the recipe {path} is not valid TOML: {e}") from None
    table = data.get("envelope")
    if not isinstance(table, dict) or set(data) != {"envelope"}:
        raise EnvelopeError(
            f"the recipe {path} needs exactly one table, [envelope]; it has {', '.join(sorted(data)) or 'none'}"
        )
    return table


def resolve(
    *,
    model: str,
    max_position_embeddings: int,
    vocab_size: int,
    experts: bool = False,
    flags: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    default_targets: tuple[Target, ...] | None = None,
) -> Envelope:
    """Resolve the envelope for one checkpoint.

    Args:
        model: the checkpoint's own name.
        max_position_embeddings: longest context that the checkpoint was made for.
        vocab_size: tokens of its vocabulary.
        experts: whether it has layers of experts.
        flags: fields set on the command line or by the API; None values count as not set.
        recipe: fields set by a recipe; flags win over it.
        default_targets: targets when nobody names one (default: this machine's best).

    Raises:
        EnvelopeError: a field is unknown, out of range, or contradicts another or the checkpoint.
    """
    chosen: dict[str, Setting] = {}
    for source, given in (("recipe", recipe or {}), ("flag", flags or {})):
        for name, value in given.items():
            if name not in _BY_NAME:
                raise EnvelopeError(
                    f"unknown envelope field {name!r} (set by {source})", hint=f"the fields are {', '.join(_BY_NAME)}"
                )
            if value is not None:
                chosen[name] = Setting(_check(_BY_NAME[name], value, source), source)

    def settle(name: str, value: Any, source: str = "default") -> Any:
        return chosen.setdefault(name, Setting(_check(_BY_NAME[name], value, source), source)).value

    if "targets" not in chosen:
        settle("targets", [str(t) for t in (default_targets or (Target.native(),))])
    targets = tuple(map(Target.parse, chosen["targets"].value))

    def settle_default(name: str) -> Any:
        return settle(name, _BY_NAME[name].default_for(targets))

    settle("model", model, "checkpoint")
    settle("dtype", _BY_NAME["dtype"].default)
    settle("numerics", _BY_NAME["numerics"].default)
    _settle_switches(chosen, vocab_size=vocab_size, experts=experts)
    settle("penalties", _BY_NAME["penalties"].default)
    max_model_len = settle("max_model_len", max_position_embeddings, "checkpoint")
    if max_model_len > max_position_embeddings:
        raise EnvelopeError(
            f"max_model_len is {max_model_len}, but the checkpoint was made for {max_position_embeddings} positions",
            hint=f"set max_model_len to {max_position_embeddings} or less",
        )
    max_num_seqs = settle_default("max_num_seqs")
    budget = settle_default("max_prefill_tokens")
    if budget < max_num_seqs:
        raise EnvelopeError(
            f"max_prefill_tokens is {budget}, but a step of max_num_seqs = {max_num_seqs} decodes needs as many tokens",
            hint="raise max_prefill_tokens or lower max_num_seqs",
        )
    rows = settle("max_logit_rows", max_num_seqs)
    if not max_num_seqs <= rows <= budget:
        raise EnvelopeError(
            f"max_logit_rows is {rows}; it must lie between max_num_seqs = {max_num_seqs} (every sequence may draw in"
            f" one step) and max_prefill_tokens = {budget}"
        )
    page_size = settle("page_size", _BY_NAME["page_size"].default)
    if page_size % 32:
        raise EnvelopeError(f"page_size is {page_size}, but it must be a multiple of 32")
    split = settle_default("split_positions")
    if split % page_size:
        raise EnvelopeError(f"split_positions is {split}, but it must be a multiple of page_size = {page_size}")
    return Envelope(MappingProxyType({f.name: chosen[f.name] for f in FIELDS}))


def _settle_switches(chosen: dict[str, Setting], *, vocab_size: int, experts: bool) -> None:
    """Give every numerics switch its value, and kernel_features those that the switches require."""
    strict = chosen["numerics"].value == "rl-bitwise"
    on_purpose = {switch.name: chosen[switch.name].source for switch in SWITCHES if switch.name in chosen}
    for switch in SWITCHES:
        if switch.name in chosen:
            if strict:
                switches.tighten(switch, chosen[switch.name].value, chosen[switch.name].source)
        elif strict and switch.needed and switch.needed[0] != switch.default:
            chosen[switch.name] = Setting(switch.needed[0], "tightened")
        elif switch.default is None:
            chosen[switch.name] = Setting(switches.settled(switch.name, chosen["logprob_order"].value), "default")
        else:
            chosen[switch.name] = Setting(switch.default, "default")
    values = {switch.name: chosen[switch.name].value for switch in SWITCHES}
    switches.check_against_model(values, on_purpose, vocab_size=vocab_size, experts=experts)
    required = {feature for switch in SWITCHES if values[switch.name] is True for feature in switch.features}
    have = chosen.setdefault("kernel_features", Setting((), "default"))
    if required - set(have.value):
        chosen["kernel_features"] = Setting(tuple(sorted({*have.value, *required})), "tightened")


def _check(field: Field, value: Any, source: str) -> Any:
    """``value`` in canonical form, or EnvelopeError naming the field, the value found and the values possible."""
    where = f"{field.name} (set by {source})"
    if field.name == "dtype":
        if not isinstance(value, str) or value not in DTYPES:
            raise EnvelopeError(f"{where} is {value!r}; it must be float32 or bfloat16")
        return DTYPES[value]
    if field.name == "numerics":
        if value not in NUMERICS:
            raise EnvelopeError(f"{where} is {value!r}; it must be one of {', '.join(NUMERICS)}")
        return value
    if field.name == "targets":
        parsed = sorted({Target.parse(name.strip()) for name in _names(value, where)})
        if not parsed:
            raise EnvelopeError(f"{where} is empty; name at least one target")
        return tuple(str(t) for t in parsed)
    if field.name == "kernel_features":
        names = _names(value, where)
        if unknown := sorted(set(names) - set(KERNEL_FEATURES)):
            raise EnvelopeError(f"{where} names {unknown[0]!r}; the features are {', '.join(KERNEL_FEATURES)}")
        return tuple(sorted(set(names)))
    switch = switches.BY_NAME.get(field.name)
    if field.name == "penalties" or (switch is not None and switch.choices == (False, True)):
        if not isinstance(value, bool | str) or value not in _SWITCH:
            raise EnvelopeError(f"{where} is {value!r}; it must be on or off")
        return _SWITCH[value]
    if switch is not None and switch.choices:
        if value not in switch.choices:
            raise EnvelopeError(f"{where} is {value!r}; it must be one of {', '.join(switch.choices)}")
        return value
    if field.name == "model":
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise EnvelopeError(f"{where} is {value!r}; it must be a non-empty name of printable characters")
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise EnvelopeError(f"{where} is {value!r}; it must be a whole number")
    if not (field.low or 0) <= value <= (field.high or value):
        raise EnvelopeError(f"{where} is {value}; it must lie between {field.low} and {field.high}")
    return value


def _names(value: Any, where: str) -> list[str]:
    """Names with commas between, or a list of them, or of Targets."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | Target) for name in names):
        raise EnvelopeError(f"{where} is {value!r}; it must be names with commas between, or a list of names")
    return [str(name) for name in names]


def _source(field: Field, source: Any) -> str:
    if source not in SOURCES:
        raise EnvelopeError(f"{field.name} was set by {source!r}; it must be one of {', '.join(SOURCES)}")
    return str(source)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
