"""The arithmetic of price-performance, at the public figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.cost.compare import Comparison, Offer
from hetero.cost.prices import PriceList

PRICES = PriceList.read(Path(__file__).parents[3] / "benchmarks" / "prices" / "us-east-1-2022.json")
P4D = Offer(PRICES.of({"ml.p4d.24xlarge": 1}), 192)
P4D_AND_C5 = Offer(PRICES.of({"ml.p4d.24xlarge": 1, "ml.c5.18xlarge": 2}), 86)
P3 = Offer(PRICES.of({"ml.p3.2xlarge": 1}), 1193)
P3_AND_C5 = Offer(PRICES.of({"ml.p3.2xlarge": 1, "ml.c5.9xlarge": 1}), 184)


def test_the_price_file_gives_the_public_prices_of_the_clusters() -> None:
    prices = [offer.price_per_hour for offer in (P4D, P4D_AND_C5, P3, P3_AND_C5)]
    assert prices == pytest.approx([37.688, 45.032, 3.825, 5.661])


def test_the_public_costs_of_a_step_come_out_in_us_cents() -> None:
    cents = [round(100 * offer.cost_of_step, 3) for offer in (P4D, P4D_AND_C5, P3, P3_AND_C5)]
    assert cents == [0.201, 0.108, 0.127, 0.029]


@pytest.mark.parametrize(
    ("old", "new", "speed_up", "percent"),
    [(P4D, P4D_AND_C5, 2.2, 46), (P3, P3_AND_C5, 6.5, 77)],
    ids=["p4d and c5.18xlarge", "p3 and c5.9xlarge"],
)
def test_the_public_gains_come_out(old: Offer, new: Offer, speed_up: float, percent: int) -> None:
    found = Comparison(old, new)
    assert round(found.speed_up, 1) == speed_up
    assert round(100 * found.price_performance) == percent


def test_price_performance_is_nothing_where_speed_grows_as_the_price_does_and_negative_below() -> None:
    assert Comparison(Offer(10.0, 100.0), Offer(20.0, 50.0)).price_performance == pytest.approx(0.0)
    dearer = Comparison(Offer(10.0, 100.0), Offer(20.0, 80.0))
    assert dearer.price_performance == pytest.approx(-0.6)
    assert dearer.price_ratio == pytest.approx(2.0)
    assert dearer.speed_up < dearer.price_ratio


@pytest.mark.parametrize(("price", "step_ms"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_an_offer_refuses_what_no_cluster_has(price: float, step_ms: float) -> None:
    with pytest.raises(ValueError, match="must be greater than 0 and finite"):
        Offer(price, step_ms)
