"""What is said about addresses in S3 before anybody is asked; tests/contract/test_s3.py asks a server."""

from __future__ import annotations

import os
import sys

import pytest

from hetero.errors import InputError
from hetero.inputs import s3


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("S3://bucket/prefix", "small letters and two slashes"),
        ("s3:/bucket/prefix", "small letters and two slashes"),
        ("s3a://bucket/prefix", "small letters and two slashes"),
        ("s3:bucket", "small letters and two slashes"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://b/prefix", "'b' is no bucket: its name has 3 to 63 letters"),
        ("s3://my bucket/prefix", "'my bucket' is no bucket"),
        ("s3://bucket-/prefix", "'bucket-' is no bucket"),
        (f"s3://{'b' * 64}/prefix", "is no bucket"),
        ("s3://bucket/pre\nfix", "a prefix has no control characters"),
    ],
)
def test_an_address_that_is_none_is_told_what_is_wrong_with_it(address: str, said: str) -> None:
    problem = s3.problem_of(address)
    assert problem is not None
    assert problem.startswith("an address in S3 has the form s3://bucket/prefix")
    assert said in problem


@pytest.mark.parametrize(
    "address",
    ["s3://bucket", "s3://bucket/", "s3://my.bucket-1/a b/ü/*", f"s3://{'b' * 63}/x", "/data/s3:/x", "data", "", "s3"],
)
def test_addresses_and_folders_have_no_problem(address: str) -> None:
    assert s3.problem_of(address) is None


def test_only_the_exact_scheme_makes_an_address() -> None:
    assert s3.is_address("s3://bucket")
    for other in ("S3://bucket", "s3:/bucket", "/s3://bucket", None, 3, b"s3://bucket"):
        assert not s3.is_address(other)


@pytest.mark.parametrize("address", ["bucket/prefix", "S3://bucket", "s3://", "/data"])
def test_what_is_no_address_cannot_be_listed_and_is_named(address: str) -> None:
    with pytest.raises(InputError) as caught:
        s3.files(address)
    assert str(caught.value).startswith(f"{address!r} cannot be listed: an address in S3 ")


def test_waits_are_bounded_where_the_environment_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in s3.WAITS_MS:
        monkeypatch.setenv(name, "1")  # so that monkeypatch takes away what is set below
        monkeypatch.delenv(name)
    monkeypatch.setenv("S3_REQUEST_TIMEOUT_MSEC", "77")
    s3.bound_waits()
    assert os.environ["S3_REQUEST_TIMEOUT_MSEC"] == "77"
    assert int(os.environ["S3_CONNECT_TIMEOUT_MSEC"]) <= 5_000


@pytest.mark.parametrize("missing", ["tensorflow", "tensorflow_io"])
def test_a_process_that_may_not_need_s3_goes_on_without_tensorflow_io_and_says_so(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in s3.WAITS_MS:
        monkeypatch.setenv(name, "1")
    absent = None  # in sys.modules: not installed
    monkeypatch.setitem(sys.modules, "tensorflow", absent if missing == "tensorflow" else sys)
    monkeypatch.setitem(sys.modules, "tensorflow_io", absent)
    s3.prepare({"labels": "/data", "training": "s3://bucket/prefix"})
    said = capsys.readouterr().err
    assert "channel 'training' is s3://bucket/prefix" in said
    assert missing in said
    assert "Install the release of tensorflow-io" in said
    s3.prepare({"labels": "/data"})
    assert capsys.readouterr().err == ""


def test_tensorflows_error_about_a_missing_file_system_gets_a_hint_and_others_do_not() -> None:
    hint = s3.hint("UNIMPLEMENTED: File system scheme 's3' not implemented (file: 's3://bucket/a')")
    assert "tensorflow-io is missing there" in hint
    assert "Install the release of tensorflow-io" in hint
    assert s3.hint("File system scheme 'gs' not implemented") == ""
    assert s3.hint("") == ""
