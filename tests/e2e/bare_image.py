"""A Python environment like that of an image which has all that hetero needs but hetero itself."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

MISSING = ("hetero", "_editable_impl_hetero", "typer", "tensorflow")
"""What this environment has and the image has not, by the beginning of its names.

Without TensorFlow it is an image for framework="torch", for which no Horovod has to be compiled; the package is enough.
"""
_TRAIN = """#!{python}
from sagemaker_training.cli.train import main
main()
"""


def make(folder: Path, runs_as: str) -> dict[str, str]:
    """Make the environment.

    Args:
        folder: Where it goes; it can be moved and copied from there.
        runs_as: Path under which its programs will be started.

    Returns:
        Environment variables by which programs use it there.
    """
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", folder], check=True)
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith((*MISSING, "pip", "__pycache__")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "image.pth").write_text(f"{os.path.relpath(packages, site)}\n")
    train = folder / "bin" / "train"
    train.write_text(_TRAIN.format(python=f"{runs_as}/bin/python"))
    train.chmod(0o755)
    return {"PATH": f"{runs_as}/bin:{os.environ['PATH']}", "PYTHONPATH": ""}
