"""The documents speak of what is there: links, files, modules, tests, options, exit codes, messages, metric lines.

Run as a script it writes the table of options into docs/running.md.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from hetero import errors
from hetero.data.schedule import Schedule
from hetero.options import OPTIONS, options_help
from hetero.training.meter import StepMeter

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
RUNNING = ROOT / "docs" / "running.md"
SAGEMAKER = ROOT / "docs" / "sagemaker.md"
FOLDERS = ("hetero/", "tests/", "docs/", "protos/", "examples/", "benchmarks/", "docker/", "notebooks/")
OPTIONS_BLOCK = re.compile(r"(<!-- options[^\n]*-->\n```\n)(.*?)(```\n)", re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def quoted(text: str) -> list[str]:
    """Return what stands in single backticks outside code blocks."""
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def without_blocks(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^[ ]*```.*?^[ ]*```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def with_table(text: str) -> str:
    """Return the text of docs/running.md with the table of options as it must be."""
    return OPTIONS_BLOCK.sub(lambda found: found[1] + options_help() + "\n" + found[3], text)


@every_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


@every_page
def test_named_files_exist(page: Path) -> None:
    words = [word for text in quoted(page.read_text(encoding="utf-8")) for word in text.split()]
    paths = [word.rstrip(",;:").partition(":")[0] for word in words if word.startswith(FOLDERS)]
    missing = [path for path in paths if not (any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists())]
    assert not missing


@every_page
def test_named_modules_exist(page: Path) -> None:
    missing = [name for name in quoted(page.read_text(encoding="utf-8")) if is_module_name(name) and not exists(name)]
    assert not missing


def is_module_name(text: str) -> bool:
    """Tell whether a text is a dotted name of the package; calls count by the name before the bracket."""
    return re.fullmatch(r"hetero(\.\w+)+(\(.*\))?", text) is not None


def exists(name: str) -> bool:
    """Tell whether a dotted name is a module, or stands in one."""
    place, source = ROOT, ""
    for part in name.partition("(")[0].split("."):
        if (place / part).is_dir():
            place /= part
            init = place / "__init__.py"
            source = init.read_text(encoding="utf-8") if init.exists() else ""
        elif (place / f"{part}.py").is_file():
            source = (place / f"{part}.py").read_text(encoding="utf-8")
        elif not re.search(rf"\b{part}\b", source):
            return False
    return True


@every_page
def test_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    everywhere = "\n".join(sources.values())
    missing = [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in everywhere]
    missing += [
        f"{name} in {path}"
        for name, path in re.findall(r"`(test_\w+)` in `(tests/[\w/.]+)`", text)
        if f"def {name}(" not in sources.get(ROOT / path, "")
    ]
    assert not missing


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "index.md"]
    assert [page for page in pages if f"({page.relative_to(ROOT / 'docs')})" not in index] == []


def test_every_module_has_its_line_in_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    silent = {"__main__.py", "__init__.py"}
    modules = [
        path for path in (ROOT / "hetero").rglob("*.py") if path.name not in silent and "_proto" not in path.parts
    ]
    assert [path.name for path in modules if f"`{path.relative_to(ROOT)}`" not in design] == []


def test_the_table_of_options_is_up_to_date() -> None:
    text = RUNNING.read_text(encoding="utf-8")
    assert OPTIONS_BLOCK.search(text)
    assert with_table(text) == text, "run: python tests/unit/test_docs.py"


@every_page
def test_options_that_are_spoken_of_exist(page: Path) -> None:
    commands = {
        "--no-awake", "--prices", "--seconds", "--shape", "--step", "--data", "--warm-up", "--privileged", "--cgroupns",
        "--data-hosts", "--trainer-hosts", "--data-cpus", "--trainer-cpus", "--json", "--keep", "--topology", "--host",
        "--debug", "--version", "--timeout-s", "--my-own-option", "--my-width", "--name", "--no-group",
        "--no-build-isolation", "--no-cache-dir", "--runs", "--durations", "--watch", "--every-s", "--python",
        "--port", "--protocol", "--output", "--image", "--abort-on-container-exit",
        "--results", "--build", "--build-arg", "--no-deps", "--index-url", "--volumes", "--profile",
    }  # fmt: skip
    known = commands | {option.flag for option in OPTIONS}
    flags = {
        flag for text in quoted(page.read_text(encoding="utf-8")) for flag in re.findall(r"(?<!\S)--[a-z][\w-]+", text)
    }
    assert flags <= known


def test_every_exit_code_and_error_is_in_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([0-9, ]+) \| ([^|]*) \|", design, re.MULTILINE))
    codes = {int(code): names for key, names in rows.items() for code in key.split(",")}
    for name, kind in vars(errors).items():
        if not (isinstance(kind, type) and issubclass(kind, errors.HeteroError)):
            continue
        for code in [130, 143] if kind is errors.Stopped else [kind.exit_code]:
            assert re.search(rf"\b{name}\b", codes.get(code, "")), (
                f"{name} ends with {code}, which docs/design.md does not say"
            )
    failures = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    assert [code for code in codes if not re.search(rf"\b{code}\b", failures)] == []


def test_messages_are_those_of_the_code() -> None:
    section = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8").partition("## Common errors")[2]
    fragments = [part for row in re.findall(r"^\| `([^`]+)`", section, re.MULTILINE) for part in row.split(" ... ")]
    texts = [
        node.value
        for path in (ROOT / "hetero").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(fragments) > 20
    assert [part for part in fragments if not any(part in text for text in texts)] == []


def test_metric_definitions_match_what_rank_0_prints() -> None:
    found = re.search(r"<!-- metrics -->\n```json\n(.*?)```", SAGEMAKER.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    lines: list[str] = []
    seconds = iter(range(100))
    meter = StepMeter(emit=lines.append, clock=lambda: float(next(seconds)), interval_s=1000.0)
    for _ in meter.batches(0, [Rows(), Rows(), Rows()]):
        pass
    definitions = json.loads(found[1])
    assert len(definitions) == 3
    for definition in definitions:
        match = re.search(definition["Regex"], f"[trainer algo-3 rank-0] {lines[0]}")
        assert match, definition["Name"]
        assert float(match[1]) >= 0


class Rows:
    """A batch of four rows, as the meter sees it."""

    class mask:  # noqa: N801
        @staticmethod
        def sum() -> int:
            return 4


def test_the_worked_example_of_the_design_is_what_the_schedule_does() -> None:
    steps = Schedule(2, 4, pad=False).update([3, 1], [1, 2])
    assert [step.level for step in steps] == [0, None]
    assert [[(piece.owner, piece.batch) for piece in share.pieces] for share in steps[1].shares] == [[(0, 1)], [(0, 2)]]
    padded = Schedule(2, 4, pad=True)
    assert [share.rows for share in padded.update([3, 1], [1, 2])[2].shares] == [1, 2]


if __name__ == "__main__":
    RUNNING.write_text(with_table(RUNNING.read_text(encoding="utf-8")), encoding="utf-8")
