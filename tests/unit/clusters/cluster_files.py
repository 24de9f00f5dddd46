"""Cluster files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

JOB = 'import hetero\n\njob = hetero.Job("mine", engine="{engine}", batch_size=8, depth=3)\n'
GOOD: dict[str, Any] = {
    "job": "mine.py:job",
    "source": "src",
    "trainer": {"hosts": 1, "cpus": 1.2, "ranks": 2},
    "data": {"hosts": 2, "cpus": 0.6},
}


def write(folder: Path, content: dict[str, Any] | str, name: str = "mine.yaml", engine: str = "grpc") -> Path:
    """Write a cluster file, and its job below src/; return the file's path."""
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src" / "mine.py").write_text(JOB.format(engine=engine))
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path
