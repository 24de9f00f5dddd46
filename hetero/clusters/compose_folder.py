"""The folder that `hetero compose-config` writes: compose.yaml and config/, whole or not at all.

Both are made aside and then renamed into their places. What somebody else wrote is never replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hetero.clusters.compose import HEADER
from hetero.errors import SettingsError

COMPOSE_FILE = "compose.yaml"
CONFIG_FOLDER = "config"
_MARK = "WRITTEN-BY-HETERO"
_MARK_TEXT = "This folder is replaced by `hetero compose-config`.\n"


def write(folder: Path, compose_text: str, files: Mapping[str, str]) -> None:
    """Write or replace the compose file and the hosts' configuration.

    Args:
        folder: Where to; made if it is not there. Other files in it are left alone.
        compose_text: Content of compose.yaml.
        files: Path below config/ -> content.

    Raises:
        SettingsError: What is there was not written by this command, or there is no room or right to write; then all
            is as it was.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_others(folder)
        aside = Path(tempfile.mkdtemp(dir=folder, prefix=".compose-config-"))
        try:
            _fill(aside, compose_text, files)
            _swap(folder, aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        text = f"cannot write to {folder}: {error.strerror or error}. Name an --output where there is room and right"
        raise SettingsError([text]) from error


def _refuse_others(folder: Path) -> None:
    compose, config = folder / COMPOSE_FILE, folder / CONFIG_FOLDER
    problems = []
    if os.path.lexists(compose) and not _begins_with(compose, HEADER):
        problems.append(f"{compose} was not written by hetero compose-config. Name another --output, or move it away")
    ours = not config.is_symlink() and (_begins_with(config / _MARK, _MARK_TEXT) or _is_empty(config))
    if os.path.lexists(config) and not ours:
        problems.append(f"{config} was not written by hetero compose-config. Name another --output, or move it away")
    if problems:
        raise SettingsError(problems)


def _begins_with(path: Path, text: str) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(text.encode())) == text.encode()


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _fill(aside: Path, compose_text: str, files: Mapping[str, str]) -> None:
    aside.chmod(0o755)
    texts = {f"{CONFIG_FOLDER}/{name}": text for name, text in files.items()}
    texts |= {f"{CONFIG_FOLDER}/{_MARK}": _MARK_TEXT, COMPOSE_FILE: compose_text}
    for name, text in texts.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)  # a container's user is none of this machine's
    for path in aside.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def _swap(folder: Path, aside: Path) -> None:
    """Put both in their places; if the second cannot be, take back the first."""
    config, old = folder / CONFIG_FOLDER, aside / "old"
    had_one = config.exists()
    if had_one:
        config.rename(old)
    try:
        (aside / CONFIG_FOLDER).rename(config)
        (aside / COMPOSE_FILE).replace(folder / COMPOSE_FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            if not (aside / CONFIG_FOLDER).exists():
                config.rename(aside / CONFIG_FOLDER)
            if had_one:
                old.rename(config)
        raise
