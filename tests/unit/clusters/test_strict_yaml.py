"""YAML files: what is refused, and that nothing but SettingsError comes out."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.clusters.strict_yaml import MOST_BYTES, read_mapping
from hetero.errors import SettingsError


def read(tmp_path: Path, content: str | bytes) -> dict[str, object]:
    path = tmp_path / "file.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_mapping(path)


def test_json_values_are_read(tmp_path: Path) -> None:
    text = "\ufeffa: 1\nb: [0.5, true, null, 'x: y']\nc: {d: größe}\n"
    assert read(tmp_path, text) == {"a": 1, "b": [0.5, True, None, "x: y"], "c": {"d": "größe"}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", r"line 3: a is there twice"),
        ("a: {b: 1, b: 2}\n", r"line 1: b is there twice"),
        ("a: &x [1]\nb: *x\n", r"line 2: \*x is an alias; write the value out"),
        ("a: &x {y: 1}\nb: {<<: *x}\n", r"line 2: "),
        ("1: a\n", r"line 1: 1 is no text"),
        ("on: a\n", r"line 1: on is no text"),
        ("[a]: b\n", r"a list or mapping is no text"),
        ("a: 2020-01-01\n", r"line 1: 2020-01-01 is read as timestamp; quote it"),
        ('a: "\\ud800"\n', r"a is '.ud800'; it needs a text of whole Unicode characters"),
        ('"\\udc00": 1\n', r"it needs a text of whole Unicode characters"),
        ("a: .nan\n", r"a is nan; it needs a finite number"),
        ("a: {b: [0, .inf]}\n", r"a.b\[1\] is inf; it needs a finite number"),
        ("a: " + "9" * 30, r"a is 100 bits long; it needs a number of at most 19 digits"),
        ("a: " + "9" * 5000, r"cannot be read as YAML|bits long"),
        ("a: !!python/object/apply:os.system [ls]\n", r"could not determine a constructor"),
        ("a: !!binary aGk=\n", r"is read as binary"),
        ("a: 1\n--- \nb: 1\n", r"no YAML"),
        ("a: [\n", r"line 2: no YAML"),
        ("a:\n\t- b\n", r"no YAML"),
        ("", r"holds nothing; it needs lines such as"),
        ("- a\n", r"holds \['a'\]; it needs lines"),
        (b"a: \xff\n", r"is not UTF-8 \(byte 3\)"),
        ("a: \x07\n", r"no YAML"),
        ("a: " + "[" * 5000, r"cannot be read as YAML|no YAML"),
        ("a: " + "x" * MOST_BYTES, r"greater than 64 KiB"),
    ],
)
def test_what_could_surprise_is_refused(tmp_path: Path, content: str | bytes, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as error:
        read(tmp_path, content)
    assert str(tmp_path / "file.yaml") in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*nothing.yaml: No such file"):
        read_mapping(tmp_path / "nothing.yaml")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(alphabet="ab:{}[]&*!<>|-#'\"\n\t ,?01.~%@", max_size=60))
def test_whatever_is_in_the_file_it_is_a_mapping_or_a_settings_error(tmp_path: Path, content: str | bytes) -> None:
    with contextlib.suppress(SettingsError):
        assert isinstance(read(tmp_path, content), dict)
