"""The README's first command, and the package as a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from local_job import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_trains_twice_compares_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "hetero", "demo", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for run in ("homogeneous", "heterogeneous"):
        assert result[run]["outcome"] == "succeeded"
        assert result[run]["ranks"] == 2
        assert result[run]["results"]["test_accuracy"] >= 0.90
        assert result[run]["lost_workers"] == 0
    assert result["homogeneous"]["hosts"] == {"data": 0, "trainer": 1}
    assert result["heterogeneous"]["hosts"] == {"data": 2, "trainer": 1}
    assert result["heterogeneous"]["engine"] == "tf_data"
    ratio = result["heterogeneous"]["rows_per_s"] / result["homogeneous"]["rows_per_s"]
    assert result["speed_up"] == pytest.approx(ratio)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hetero-demo")]


@pytest.mark.slow
def test_the_wheel_carries_the_example_and_depends_on_no_tensorflow(tmp_path: Path) -> None:
    subprocess.run(["uv", "build", "--wheel", "-q", "--out-dir", str(tmp_path), str(REPOSITORY)], check=True)
    (wheel,) = tmp_path.glob("hetero-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        (packaged,) = [name for name in names if name.endswith("examples/digits.py")]
        assert archive.read(packaged).decode() == (REPOSITORY / "examples" / "digits" / "job.py").read_text()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert any("grpcio" in line for line in required)
    assert not [line for line in required if "tensorflow" in line or "horovod" in line]
