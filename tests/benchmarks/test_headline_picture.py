"""The picture of benchmarks/headline.py is drawn whatever parts were measured. Needs the dependency group `bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
from headline_example import result

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shapes", "engines", "steps"),
    [
        ("AB", ("tf_data", "grpc"), ("0", "device")),
        ("B", ("grpc",), ("0",)),
        ("A", ("tf_data",), ("device",)),
    ],
    ids=["all", "one without accelerator", "one with"],
)
def test_the_picture_is_drawn_of_what_there_is(
    tmp_path: Path, shapes: str, engines: tuple[str, ...], steps: tuple[str, ...]
) -> None:
    pytest.importorskip("matplotlib")
    from headline_picture import draw

    whole = result()
    parts = [
        part
        for part in whole["parts"]
        if part["shape"] in shapes and part["engine"] in engines and part["step"] in steps
    ]
    draw({**whole, "parts": parts}, tmp_path / "picture.png")
    content = (tmp_path / "picture.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > 500
