"""Without PyTorch, `hetero.torch` can be imported and says what to install when it is used."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import hetero.torch
from hetero.errors import HeteroError
from hetero.job import TrainContext
try:
    hetero.torch.BatchStream(TrainContext(feed=None), 0)
except HeteroError as error:
    print(error)
"""


def test_the_error_names_the_command_that_installs_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert "PyTorch cannot be used" in done.stdout
    assert done.stdout.strip().endswith("pip install torch")
