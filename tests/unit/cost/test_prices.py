"""Price files: read whole, or refused with all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.cost.prices import PriceList
from hetero.errors import SettingsError

GOOD: dict[str, Any] = {
    "region": "eu-west-1",
    "date": "2024-02-29",
    "currency": "USD",
    "source": "an invoice",
    "per_hour": {"ml.big": 10, "ml.small": 0.5},
}


def written(folder: Path, values: Any) -> Path:
    path = folder / "prices.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


def test_a_price_list_adds_up_what_a_cluster_costs_and_says_where_from(tmp_path: Path) -> None:
    prices = PriceList.read(written(tmp_path, GOOD))
    assert prices.of({"ml.big": 1, "ml.small": 3}) == pytest.approx(11.5)
    assert prices.describe() == "eu-west-1, 2024-02-29, USD: an invoice"


def test_an_unknown_type_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    prices = PriceList.read(written(tmp_path, GOOD))
    with pytest.raises(SettingsError, match=r"no price for ml\.other in eu-west-1 of 2024-02-29; there are ml\.big"):
        prices.of({"ml.big": 1, "ml.other": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"region": ""}, "region is ''; it needs a text"),
        ({"source": None}, "source is None; it needs a text"),
        ({"date": "last year"}, "date is 'last year'; it needs a day"),
        ({"date": "20240229"}, "date is '20240229'; it needs a day"),
        ({"per_hour": {}}, "per_hour is {}; it needs an object"),
        ({"per_hour": {"ml.big": -1}}, "the price of ml.big is -1; it needs a number greater than 0"),
        ({"per_hour": {"ml.big": True}}, "the price of ml.big is True"),
        ({"per_hour": {"ml.big": "1"}}, "the price of ml.big is '1'"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**GOOD, **change})
    with pytest.raises(SettingsError) as refused:
        PriceList.read(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        PriceList.read(written(tmp_path, {"per_hour": {"ml.big": 0}}))
    assert len(refused.value.problems) == 5


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="price file"):
        PriceList.read(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        PriceList.read(tmp_path / "none.json")
