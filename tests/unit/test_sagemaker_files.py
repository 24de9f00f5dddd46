"""The files in docker/sagemaker and the guide beside them agree with each other and with pyproject.toml."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from hetero.options import OPTIONS

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker" / "sagemaker"
GUIDE = (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
IN_EVERY_IMAGE = {"numpy", "protobuf", "sagemaker-training"}


def block(name: str) -> ast.Module:
    """Return a block of Python of the guide by the comment above it."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
    assert found, name
    return ast.parse(found[1])


def test_requirements_are_the_projects_own_without_what_every_image_has() -> None:
    listed = re.search(r"^dependencies = \[(.*?)\]", PROJECT, re.DOTALL | re.MULTILINE)
    assert listed
    dependencies = re.findall(r'"(.+?)"', listed[1])
    expected = {text for text in dependencies if re.split("[>=<]", text)[0] not in IN_EVERY_IMAGE}
    lines = (DOCKER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    required = {line for line in lines if not line.startswith("#")}
    assert required == expected | {"horovod==0.28.1"}


def test_every_horovod_is_the_projects() -> None:
    texts = [PROJECT, (DOCKER / "wheels.sh").read_text(encoding="utf-8"), (DOCKER / "requirements.txt").read_text()]
    assert {version for text in texts for version in re.findall(r"horovod==([\d.]+)", text)} == {"0.28.1"}


def test_the_dockerfile_starts_from_the_tensorflow_of_the_reference_stack() -> None:
    tensorflow = re.search(r'"tensorflow-cpu==([\d.]+)"', PROJECT)
    assert tensorflow
    assert f"ARG TAG={tensorflow[1]}-gpu-" in DOCKERFILE
    assert f"TAG={tensorflow[1]}-cpu-" in GUIDE


def test_the_guide_names_the_dockerfiles_arguments() -> None:
    arguments = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
    given = set(re.findall(r"--build-arg (\w+)=", GUIDE))
    assert given <= arguments
    assert [name for name in arguments if name not in GUIDE] == []


def test_what_the_dockerfile_copies_is_there() -> None:
    for sources in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert [source for source in sources.split() if not (ROOT / source).exists()] == []


def test_the_guides_jobs_have_options_of_the_run() -> None:
    known = {option.flag.removeprefix("--") for option in OPTIONS}
    for name in ("sdk 2", "sdk 3"):
        keywords = {
            word.arg: word.value
            for node in ast.walk(block(name))
            if isinstance(node, ast.Call)
            for word in node.keywords
        }
        assert set(ast.literal_eval(keywords["hyperparameters"])) <= known
        assert "HETERO_TOKEN" in ast.unparse(keywords["environment"])


def test_the_script_says_how_it_is_used() -> None:
    done = subprocess.run([DOCKER / "wheels.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "wheels.sh FOLDER [REQUIREMENT...]" in done.stderr


def test_the_script_does_not_overwrite_requirements_of_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("scikit-learn\n")
    done = subprocess.run([DOCKER / "wheels.sh", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"-r {tmp_path}/requirements.txt" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["requirements.txt"]
    assert (tmp_path / "requirements.txt").read_text() == "scikit-learn\n"
