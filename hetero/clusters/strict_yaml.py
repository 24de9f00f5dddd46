"""YAML files that people write, read into plain values. What YAML allows beyond JSON's values is refused."""

from __future__ import annotations

import math
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from hetero.errors import SettingsError

MOST_BYTES = 64 * 1024
_MOST_DIGITS = 19


class _Refused(yaml.MarkedYAMLError):  # type: ignore[misc]  # PyYAML has no types
    """Something that YAML allows and these files do not."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader without aliases, without keys that come twice, without other values than JSON has."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases: a few lines of them can stand for a billion values."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise _Refused(None, None, f"*{event.anchor} is an alias; write the value out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping with texts as keys, each there once."""
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key_node.tag != "tag:yaml.org,2002:str":
                raise _Refused(
                    None, None, f"{key or 'a list or mapping'} is no text; a key needs one", key_node.start_mark
                )
            if key in seen:
                raise _Refused(None, None, f"{key} is there twice; leave one out", key_node.start_mark)
            seen.add(key)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return found


def _refuse_tag(_loader: _Loader, node: Any) -> Any:
    kind = node.tag.rpartition(":")[2]
    text = f"{getattr(node, 'value', kind)!s:.60} is read as {kind}; quote it if it is a text"
    raise _Refused(None, None, text, node.start_mark)


for _tag in ("timestamp", "binary", "set", "omap", "pairs", "merge"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _refuse_tag)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file that holds one mapping of JSON's values.

    Raises:
        SettingsError: It cannot be read, is greater than 64 KiB, is no such YAML, or uses aliases, keys that come
            twice, dates or numbers that JSON does not have.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError([f"cannot read {path}: {error.strerror}. Name a file that is there"]) from error
    if len(content) > MOST_BYTES:
        raise SettingsError([f"{path} is greater than {MOST_BYTES // 1024} KiB; it needs to be a short file"])
    try:
        # The loader is a safe one, and Python's own: in C's, nesting without end is a crash and no error.
        value = yaml.load(content.decode("utf-8-sig"), Loader=_Loader)  # noqa: S506
    except UnicodeDecodeError as error:
        raise SettingsError([f"{path} is not UTF-8 (byte {error.start}); save it as such"]) from error
    except yaml.YAMLError as error:
        raise SettingsError([f"{path}{_where(error)}"]) from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise SettingsError([f"{path} cannot be read as YAML: {str(error)[:200] or 'nested too deeply'}"]) from error
    if not isinstance(value, dict):
        raise SettingsError([f"{path} holds {shown(value)}; it needs lines such as `job: job.py:job`"])
    if (problem := _not_json(value, "")) is not None:
        raise SettingsError([f"{path}: {problem}".encode("utf-8", "replace").decode()])
    return value


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
    if isinstance(error, _Refused):
        return f", line {mark.line + 1}: {problem}" if mark else f": {problem}"
    return f", line {mark.line + 1}: no YAML: {problem}" if mark else f" is no YAML: {problem}"


def _not_json(value: object, key: str) -> str | None:
    """Return what is wrong with a value that JSON does not have or no program of the run could use."""
    if isinstance(value, dict):
        inner = ((part, f"{key}.{name}" if key else name) for name, item in value.items() for part in (name, item))
    elif isinstance(value, list):
        inner = ((item, f"{key}[{index}]") for index, item in enumerate(value))
    else:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} is {value}; it needs a finite number"
        if isinstance(value, str) and not _is_unicode(value):
            return f"{key} is {value!a:.60}; it needs a text of whole Unicode characters"
        if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
            return f"{key} is {value.bit_length()} bits long; it needs a number of at most {_MOST_DIGITS} digits"
        return None
    return next((problem for item, where in inner if (problem := _not_json(item, where)) is not None), None)


def _is_unicode(text: str) -> bool:
    """Return whether a text can be written: YAML's escapes can make halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """Return a value as a message shows it, shortened."""
    text = "nothing" if value is None else "a mapping" if isinstance(value, dict) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
