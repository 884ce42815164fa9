"""The documentation is true: links resolve, files and functions exist, commands parse, examples run, and what
docs/numerics.md and artifacts/README.md claim holds on a tiny checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import write_checkpoint

from tokenspeed import SamplingParams, artifact
from tokenspeed.bucket import Bucket
from tokenspeed.cli.main import COMMANDS, build_parser, parse
from tokenspeed.envelope import FIELDS
from tokenspeed.step import PlacedTensor
from tokenspeed.switches import SWITCHES
from tokenspeed.target import runnable_targets

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {".git", ".venv", "build", "checkpoints", "node_modules", ".pytest_cache", ".hypothesis"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not SKIPPED & set(path.relative_to(ROOT).parts[:-1])
    and (path.parent == ROOT / "artifacts" or "artifacts" not in path.relative_to(ROOT).parts)
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def inline_code(page: Path) -> list[str]:
    return [code.replace("\n", " ") for code in INLINE.findall(prose(page))]


# ---- links, files, functions ----------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The fragments that headings of a page make, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: there is no {link}"
        assert not fragment or fragment in anchors(target), f"{page.name}: {link}: no such heading"


FOLDERS = {
    prefix: base
    for base, prefixes in {
        ROOT: ("tokenspeed", "kernels", "csrc", "tests", "docs", "examples", "benchmarks", "artifacts/recipes"),
        ROOT / "tokenspeed": ("compile", "runtime", "cli"),
        ROOT / "tokenspeed" / "runtime": ("server",),
    }.items()
    for prefix in prefixes
}


def named_files(page: Path) -> list[tuple[str, list[Path]]]:
    """Paths in backticks that begin with a folder of ours, with the files that they stand for."""
    found = []
    for code in inline_code(page):
        base = next((base for prefix, base in FOLDERS.items() if code.startswith(f"{prefix}/")), None)
        if base is not None and re.fullmatch(r"[\w./*+-]+", code):
            found.append((code, sorted(base.glob(code.rstrip("/")))))
    return found


@every_page
def test_named_files_exist(page: Path) -> None:
    missing = [code for code, files in named_files(page) if not files]
    assert not missing, f"{page.name} names {missing}"


@every_page
def test_named_functions_exist(page: Path) -> None:
    """``file`: `name`, `name`` says that the names are in the file."""
    for code, names in re.findall(r"`([\w./]+\.\w+)`:\s((?:`\w+`(?:,\s)?)+)", prose(page)):
        text = (ROOT / code).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{page.name}: {code} has no {name}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES:
        if page.parent == ROOT / "docs" and page.name != "README.md":
            assert f"]({page.name})" in index, f"docs/README.md does not list {page.name}"


# ---- commands -------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Command lines of ours in a block of shell, without what comes behind a pipe."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"\s*(\$ )?tokenspeed\s", line)]


def shown_commands(page: Path) -> list[str]:
    text = page.read_text()
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "sh", "bash", "console", "text")]
    return commands("\n".join([*blocks, *re.findall(r"^    .*$", prose(page), re.MULTILINE)]))


def words_of(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        words.append(word)
    return words[1:]


def parse_error(words: list[str]) -> str | None:
    """What the command line says against these arguments."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parse(words)
        except SystemExit as end:
            return said.getvalue() if end.code else None
    return None


@every_page
def test_shown_commands_parse(page: Path) -> None:
    for command in shown_commands(page):
        error = parse_error(words_of(command))
        assert error is None, f"{page.name}: {command}\n{error}"


def subparsers() -> dict[str, argparse.ArgumentParser]:
    choices: dict[str, argparse.ArgumentParser] = next(
        action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return choices


@every_page
def test_inline_commands_have_these_options(page: Path) -> None:
    """Inline code may leave arguments out, but names a command and options that exist."""
    known = subparsers()
    for code in inline_code(page):
        words = code.split()
        if words[0] != "tokenspeed" or len(words) < 2 or words[1].startswith("-"):
            continue
        if words[1] == "COMMAND":
            continue
        assert words[1] in COMMANDS, f"{page.name}: {code}"
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in known[words[1]]._option_string_actions, f"{page.name}: {code} has no {option}"


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_examples_of_the_help_parse(name: str | None) -> None:
    epilog = (build_parser() if name is None else subparsers()[name]).epilog or ""
    shown = commands(re.sub(r"(\S) {3,}.*", r"\1", epilog))  # what a command does stands behind it in a column
    assert shown
    for command in shown:
        error = parse_error(words_of(command))
        assert error is None, f"{command}\n{error}"


# ---- docs/api.md ----------------------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny checkpoint in it, which is the current one."""
    write_checkpoint(tmp_path / "checkpoints" / "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_of_the_api_run(workplace: Path) -> None:
    page = ROOT / "docs" / "api.md"
    blocks = [body for language, body in FENCE.findall(page.read_text()) if language == "python"]
    assert len(blocks) > 8
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page.name}, example {number}", "exec"), names)


def test_the_api_page_lists_every_parameter() -> None:
    from tokenspeed.runtime.loader import LoadOptions
    from tokenspeed.runtime.output import RequestOutput

    text = (ROOT / "docs" / "api.md").read_text()
    for record in (SamplingParams, LoadOptions, RequestOutput):
        for field in dataclasses.fields(record):
            assert f"`{field.name}`" in text, f"docs/api.md does not explain {record.__name__}.{field.name}"


# ---- artifacts/README.md --------------------------------------------------------------------------------------


def section(text: str, heading: str) -> str:
    """The text from a heading to the next one of the same level or above."""
    level = heading.partition(" ")[0]
    start = text.index(f"\n{heading}\n") + 1
    end = re.compile(rf"^#{{1,{len(level)}}} ", re.MULTILINE).search(text, start + len(heading))
    return text[start : end.start() if end else None]


def test_every_manifest_field_is_explained() -> None:
    text = (ROOT / "artifacts" / "README.md").read_text()
    records: dict[str, tuple[type[Any], ...]] = {
        "### The manifest (Manifest)": (artifact.Manifest,),
        "### `model` (ModelSection)": (artifact.ModelSection,),
        "### `targets` (TargetSection)": (
            artifact.TargetSection, artifact.BucketEntry, artifact.StepCost, PlacedTensor, Bucket,
        ),
        "### `files` (FileEntry)": (artifact.FileEntry,),
    }  # fmt: skip
    for heading, kinds in records.items():
        names = re.findall(r"`(\w+)`", section(text, heading))
        for kind in kinds:
            for field in dataclasses.fields(kind):
                assert field.name in names, f"{heading} does not explain {kind.__name__}.{field.name}"
    envelope = section(text, "### `envelope` (Envelope)")
    for setting in FIELDS:
        assert f"\n| `{setting.name}` |" in envelope, setting.name
    for level in artifact.VERIFY_LEVELS:
        assert f"\n| `{level}` |" in section(text, "## Verification"), level


def test_the_history_has_the_version_and_its_date() -> None:
    source = (ROOT / "tokenspeed" / "artifact.py").read_text()
    version, date = artifact.FORMAT_VERSION, re.search(r'"""History: .*?(\d+) \((\d{4}-\d\d-\d\d)\)', source)
    assert date is not None and int(date[1]) == version
    history = section((ROOT / "artifacts" / "README.md").read_text(), "## History")
    assert f"| {version} | {date[2]} |" in history


def test_an_artifact_has_the_files_that_are_listed_and_no_others(workplace: Path) -> None:
    first = build(workplace, "first")
    patterns = (
        r"manifest\.json|DIGEST|selection\.json|program\.json|tokenizer/(tokenizer|config)\.json",
        r"graphs/cpu-x86-64-v\d(\+\w+)?/((decode|mixed)-\d+\.tslg|values\.json)|weights/panel16-rows-bfloat16\.safetensors",
    )
    for path in sorted(p for p in first.rglob("*") if p.is_file()):
        assert re.fullmatch("|".join(patterns), path.relative_to(first).as_posix()), path
    again = build(workplace, "again")
    assert (first / "DIGEST").read_bytes() == (again / "DIGEST").read_bytes()


# ---- docs/numerics.md -----------------------------------------------------------------------------------------


def build(workplace: Path, name: str, **flags: Any) -> Path:
    from tokenspeed.compile.build import build as build_artifact

    flags = {"max_model_len": 256, "max_num_seqs": 4, "max_prefill_tokens": 64, "page_size": 32,
             "split_positions": 64, **flags}  # fmt: skip
    return build_artifact(workplace / "checkpoints" / "llama", workplace / name, **flags).path


def outcome(path: Path, target: str | None = None) -> list[Any]:
    """Tokens and log-probabilities of some requests, with attention over several splits."""
    from tokenspeed import load
    from tokenspeed.runtime.loader import LoadOptions
    from tokenspeed.target import Target

    wanted = None if target is None else Target.parse(target)
    scored = {"max_tokens": 24, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 1, "seed": 3}
    with load(path, options=LoadOptions(target=wanted, threads=2, kv_gib=0.05)) as engine:
        prompts = [[(7 * i + j) % 260 for j in range(length)] for i, length in enumerate((1, 33, 150))]
        results = [engine.generate(prompts, SamplingParams(temperature=t, **scored)) for t in (0, 0.9)]  # type: ignore[arg-type]
    return [(o.token_ids, o.logprobs, o.prompt_logprobs) for outputs in results for o in outputs]


def classes(dtype: str) -> Iterator[list[str]]:
    """Targets of one class of the table in docs/numerics.md that this machine runs."""
    table = section((ROOT / "docs" / "numerics.md").read_text(), "## Which targets agree")
    rows = re.findall(r"^\| `(cpu:[^`]+)` \| (\w)[^|]* \| (\w)[^|]*\|$", table, re.MULTILINE)
    assert len(rows) == 4
    runnable = {str(target) for target in runnable_targets()}
    letters = {target: letter[dtype == "bfloat16"] for target, *letter in rows if target in runnable}
    for letter in sorted(set(letters.values())):
        yield [target for target, own in letters.items() if own == letter]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_targets_agree_as_the_table_says(workplace: Path, dtype: str) -> None:
    members = list(classes(dtype))
    path = build(workplace, "all", dtype=dtype, targets=[target for group in members for target in group])
    for first, *others in members:
        expected = outcome(path, first)
        for other in others:
            assert outcome(path, other) == expected, f"{first} and {other}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_of_the_envelope_change_no_bits(workplace: Path, dtype: str) -> None:
    expected = outcome(build(workplace, "small", dtype=dtype))
    larger = {"max_model_len": 512, "max_num_seqs": 9, "max_prefill_tokens": 300, "max_logit_rows": 100}
    assert outcome(build(workplace, "large", dtype=dtype, **larger)) == expected


def test_rl_bitwise_and_its_switches_build_the_graphs_of_auto(workplace: Path) -> None:
    def files(built: artifact.Artifact) -> dict[str, Any]:
        return {n: f for n, f in built.manifest.files.items() if n not in ("selection.json", "equivalence.json")}

    def opened(name: str, **flags: Any) -> artifact.Artifact:
        return artifact.Artifact.open(build(workplace, name, **flags))

    auto, strict = opened("auto"), opened("rl", numerics="rl-bitwise")
    assert files(auto) == files(strict)
    assert strict.manifest.envelope.required_features and not auto.manifest.envelope.required_features
    for feature in strict.manifest.envelope.required_features:
        assert feature in strict.read("selection.json").decode()
    table = section((ROOT / "docs" / "numerics.md").read_text(), "### The tree of switches")
    rows = re.findall(r"^\| `\.?([\w.]+)` \|.*\| 0 \| 0 \|$", table, re.MULTILINE)
    free = [switch for switch in SWITCHES if any(switch.path.endswith(row) for row in rows)]
    assert {s.name for s in free} >= {"kernels_deterministic", "sampling_deterministic", "batch_invariance"}
    for switch in free:
        value = switch.needed[0] if switch.needed else switch.default
        assert files(opened(switch.name, **{switch.name: value})) == files(auto), switch.name
