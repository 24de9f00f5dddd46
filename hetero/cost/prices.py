"""Prices of instances, read from a file: a price is data with a date, a region and a source.

Sources disagree, prices change, and none is shipped as the truth. The file is JSON:

    {
      "region": "us-east-1", "date": "2022-10-27", "currency": "USD", "source": "where the figures are from",
      "per_hour": {"ml.p4d.24xlarge": 37.688, "ml.c5.18xlarge": 3.672}
    }
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import SettingsError

_TEXTS = ("region", "date", "currency", "source")


@dataclass(frozen=True)
class PriceList:
    """Prices of one region on one day.

    Attributes:
        region: As the provider calls it.
        date: The day on which they held, `YYYY-MM-DD`.
        currency: Of all of them, such as `USD`.
        source: Where they are from.
        per_hour: What an hour of each instance type costs.
    """

    region: str
    date: str
    currency: str
    source: str
    per_hour: Mapping[str, float]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PriceList:
        """Read a price file.

        Raises:
            SettingsError: It cannot be read, or is not of the form above; the message has all that is wrong.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError([f"the price file {path} cannot be read: {error}. Name one that is JSON"]) from error
        problems = _problems(values)
        if problems:
            raise SettingsError([f"price file {path}: {problem}" for problem in problems])
        per_hour = {name: float(price) for name, price in values["per_hour"].items()}
        return cls(**{name: values[name] for name in _TEXTS}, per_hour=per_hour)

    def of(self, instances: Mapping[str, int]) -> float:
        """Return what an hour of a cluster costs.

        Args:
            instances: Number of instances of each type.

        Raises:
            SettingsError: A type has no price here.
        """
        missing = sorted(name for name in instances if name not in self.per_hour)
        if missing:
            known = ", ".join(sorted(self.per_hour))
            problem = f"there is no price for {', '.join(missing)} in {self.region} of {self.date}; there are {known}"
            raise SettingsError([f"{problem}. Add it to the price file"])
        return sum(self.per_hour[name] * number for name, number in instances.items())

    def describe(self) -> str:
        """Return region, date and source, to be printed beside whatever follows from a price."""
        return f"{self.region}, {self.date}, {self.currency}: {self.source}"


def _problems(values: Any) -> list[str]:
    if not isinstance(values, dict):
        return [f"it holds {type(values).__name__}; it needs an object with {', '.join(_TEXTS)} and per_hour"]
    found = [
        f"{name} is {values.get(name)!r}; it needs a text"
        for name in _TEXTS
        if not isinstance(values.get(name), str) or not values[name].strip()
    ]
    if isinstance(values.get("date"), str) and not _is_day(values["date"]):
        found.append(f"date is {values['date']!r}; it needs a day such as 2022-10-27")
    prices = values.get("per_hour")
    if not isinstance(prices, dict) or not prices:
        return [*found, f"per_hour is {prices!r}; it needs an object of instance types and their prices"]
    return found + [
        f"the price of {name} is {price!r}; it needs a number greater than 0"
        for name, price in prices.items()
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < float("inf")
    ]


def _is_day(text: str) -> bool:
    try:
        return dt.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
