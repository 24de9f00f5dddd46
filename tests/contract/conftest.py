"""Lets these tests use the harness of the benchmarks, which runs the `grpc` engine without launchers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
