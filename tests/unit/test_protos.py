from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # downloads grpcio-tools
def test_generated_stubs_are_up_to_date(tmp_path):
    if shutil.which("uvx") is None:
        pytest.fail("protos/generate needs uvx: pip install uv")
    subprocess.run([ROOT / "protos" / "generate", tmp_path], check=True, timeout=170)
    fresh = sorted(path.name for path in (tmp_path / "hetero" / "_proto").iterdir())
    kept = sorted(path.name for path in (ROOT / "hetero" / "_proto").glob("*_pb2*"))
    assert fresh == kept
    for name in fresh:
        made, committed = tmp_path / "hetero" / "_proto" / name, ROOT / "hetero" / "_proto" / name
        assert made.read_text() == committed.read_text(), f"{name} is old: run protos/generate"
