"""The coordinator's journal: one small JSON file, replaced as a whole, that never stops the job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_journal(path: Path) -> dict[str, Any] | None:
    """Return the journal, None if there is none or it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("cannot read the journal %s (%s): starting anew", path, error)
        return None
    return value if isinstance(value, dict) else None


def write_journal(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the journal by a JSON object; see `replace_journal`."""
    replace_journal(path, json.dumps(value, default=str))


def replace_journal(path: Path, text: str) -> None:
    """Replace the journal. A full disk is logged and costs only the ability to resume.

    There is no fsync: the journal is for a coordinator that died, not for a machine that did.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        logger.warning(
            "cannot write the journal %s (%s): a restarted coordinator would not know this change", path, error
        )
        with contextlib.suppress(OSError):
            aside.unlink()
