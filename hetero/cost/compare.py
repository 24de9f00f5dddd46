"""Price-performance of two clusters that train the same job: what a step takes, and what it costs. Pure.

The cost of a step is the price of an hour times the part of an hour that the step takes. The gain in price-performance
is the part of that cost that is saved, as in the public figures of October 2022: 192 ms at 37.688 USD/h cost 0.2010 US
cents, 86 ms at 45.032 USD/h cost 0.1076, which is 46 % less (AWS Machine Learning Blog, "Improve price performance of
your model training using Amazon SageMaker heterogeneous clusters").
"""

from __future__ import annotations

from dataclasses import dataclass

_MS_AN_HOUR = 3_600_000


@dataclass(frozen=True)
class Offer:
    """A cluster and how fast it trains.

    Attributes:
        price_per_hour: Of all its instances together, greater than 0.
        step_ms: What a step takes on it, milliseconds, greater than 0; the same rows a step on all that are compared.
    """

    price_per_hour: float
    step_ms: float

    def __post_init__(self) -> None:
        for name, value in (("price_per_hour", self.price_per_hour), ("step_ms", self.step_ms)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}; it must be greater than 0 and finite")

    @property
    def cost_of_step(self) -> float:
        """What a step costs, in the currency of the price."""
        return self.price_per_hour * self.step_ms / _MS_AN_HOUR


@dataclass(frozen=True)
class Comparison:
    """What changing from one cluster to another brings.

    Attributes:
        old, new: The clusters, with the same number of rows a step.
    """

    old: Offer
    new: Offer

    @property
    def speed_up(self) -> float:
        """How many times as fast steps are."""
        return self.old.step_ms / self.new.step_ms

    @property
    def price_ratio(self) -> float:
        """How many times as much an hour costs: the speed-up below which the change costs more than it saves."""
        return self.new.price_per_hour / self.old.price_per_hour

    @property
    def price_performance(self) -> float:
        """Which part of a step's cost is saved: 0.46 is 46 % better; below 0 it costs more."""
        return 1 - self.new.cost_of_step / self.old.cost_of_step
