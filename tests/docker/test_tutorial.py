"""The tutorial of docs/compose.md, done as it says."""

import json
import re
import subprocess
import sys

import pytest
from cluster_runs import CHECKOUT, docker, own_environment

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_the_tutorials_own_pipeline_trains_on_three_containers(tmp_path):
    text = (CHECKOUT / "docs" / "compose.md").read_text()
    files = re.findall(r"`(mine/[\w.]+)`:\n\n```\w*\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == [
        "mine/make_data.py", "mine/job.py", "mine/stripes.yaml", "mine/stripes.requirements.txt",
    ]  # fmt: skip
    for name, content in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert "python3 mine/make_data.py\ndocker/up mine/stripes.yaml\n" in text
    subprocess.run([sys.executable, "mine/make_data.py"], cwd=tmp_path, check=True)
    command = [CHECKOUT / "docker" / "up", tmp_path / "mine" / "stripes.yaml", "--results", tmp_path / "results"]
    try:
        said = subprocess.run(
            command, env=own_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
            check=False,
        )  # fmt: skip
    finally:
        docker("image", "rm", "-f", "hetero-stripes")
    assert said.returncode == 0, said.stdout[-6000:]
    (folder,) = (tmp_path / "results").glob("stripes-*")
    assert json.loads((folder / "exit_codes.json").read_text()) == {"algo-1": 0, "algo-2": 0, "algo-3": 0}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 * 600 // 20
    assert summary["results"]["accuracy"] > 0.7
    for named in ("metrics.jsonl", "logs/algo-2", "console.log", "model", "compose.yaml", "config"):
        assert (folder / named).exists(), named
