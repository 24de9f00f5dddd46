"""The image of containers: what it installs is what was tried together, and what it copies is there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent.parent
DOCKER = CHECKOUT / "docker"
toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # which pytest brings


def _lines(path: Path) -> set[str]:
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}


def _name(requirement: str) -> str:
    return re.split(r"[<>=;\[ ]", requirement, maxsplit=1)[0].lower()


def test_the_image_has_the_reference_stack_and_all_that_hetero_needs():
    project = toml.loads((CHECKOUT / "pyproject.toml").read_text())
    pins = {line.partition(" ;")[0] for line in project["tool"]["uv"]["constraint-dependencies"]}
    stack = {line for line in project["dependency-groups"]["stack"] if _name(line) != "tensorflow-io"}
    pinned = {_name(line) for line in pins | stack}
    others = {line for line in project["project"]["dependencies"] if _name(line) not in pinned}
    assert _lines(DOCKER / "requirements.txt") == pins | stack | others


def test_what_the_dockerfile_copies_is_there_and_not_kept_from_it():
    kept_out = _lines(CHECKOUT / ".dockerignore")
    text = (DOCKER / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--)(.+)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert len(copied) > 5
    for path in copied:
        if not path.startswith(("docker/wheels", "docker/ca")):  # these may be there or not
            assert (CHECKOUT / path).exists(), path
        assert f"!{path.split('/')[0]}" in kept_out, path


@pytest.mark.parametrize("script", ["up", "base", "stage"])
def test_the_scripts_are_well_formed(script):
    subprocess.run(["sh" if script == "stage" else "bash", "-n", DOCKER / script], check=True)


def test_no_name_of_a_registry_is_in_what_builds_the_image():
    for path in (DOCKER / "Dockerfile", DOCKER / "requirements.Dockerfile", DOCKER / "stage", DOCKER / "base"):
        assert not re.search(r"https?://", path.read_text()), path
