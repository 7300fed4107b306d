"""Comparison of targets and their prices."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.schema import number
from jaxserve.errors import ConfigError
from jaxserve.tools.planner.plan import Plan
from jaxserve.tools.planner.targets import KINDS, Target, parse_target

_PRICE = number(0, excludes_low=True)
Prices = Mapping[str, float]  # dollars per chip and hour, by kind


@dataclass(frozen=True)
class Candidate:
    """Target in a sweep, with its plan.

    Attributes:
        target: the chips.
        plan: plan for the target; None if planning failed.
        reason: error message if planning failed, otherwise None.
        usd_per_hour: price of all its chips; None if unknown.
        num_rows: number of rows in the compared decode step: the requested number, or the maximum that fits.
        served: figures from a simulation that served a trace on the target; None without one.
    """

    target: Target
    plan: Plan | None
    reason: str | None
    usd_per_hour: float | None
    num_rows: int = 0
    served: dict[str, Any] | None = None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Price per million output tokens: the served trace's, or the lowest, with `num_rows` rows in all steps."""
        if self.served is not None:
            price: float | None = self.served["usd_per_million_output_tokens"]
            return price
        if self.usd_per_hour is None or self.plan is None or self.plan.speed is None:
            return None
        return self.usd_per_hour / 3600 / self.plan.speed.tokens_per_s[self.num_rows] * 1e6


def read_prices(path: str) -> Prices:
    """Read dollars per chip and hour from a TOML file with lines `kind = price`.

    Raises:
        ConfigError: the file is malformed, or has an unknown kind or an invalid price.
    """
    try:
        with open(path, "rb") as file:
            prices = tomllib.load(file)
    except ValueError as error:
        raise ConfigError(f"{path} must be TOML, but: {error}") from error
    for kind, price in prices.items():
        if kind not in KINDS or not _PRICE.holds(price):
            raise ConfigError(
                f"{path} must have lines of a chip, one of {list(KINDS)}, and its price in dollars per hour, as "
                f"{KINDS[0]} = 3.5, got {kind} = {price!r}"
            )
    return prices


def sweep(
    names: Iterable[str],
    make: Callable[[Target], Plan],
    *,
    prices: Prices,
    batch: int | None,
    serve: Callable[[Target, float | None], dict[str, Any]] | None = None,
) -> Iterable[Candidate]:
    """Plan one target after the other; a target that cannot be planned does not end the sweep.

    Args:
        names: names of the targets.
        make: function that plans for one target.
        prices: known prices.
        batch: number of rows in the compared decode steps, as far as they fit; None for the maximum.
        serve: returns a simulation's figures for a target with its dollars per hour; None for no simulation.

    Raises:
        ConfigError: a name is not the name of a target.
    """
    for target in [parse_target(name) for name in names]:
        price = prices.get(target.kind)
        try:
            plan = make(target)
        except ConfigError as error:
            yield Candidate(target, None, str(error), None if price is None else price * target.num_chips)
        else:
            usd_per_hour = None if price is None else price * plan.num_chips
            served = serve(target, usd_per_hour) if serve is not None and plan.fits and plan.speed is not None else None
            yield Candidate(target, plan, None, usd_per_hour, _num_rows(plan, batch), served)


def _num_rows(plan: Plan, batch: int | None) -> int:
    """Return the largest number of rows with a predicted step, at most `batch`; 0 without predictions."""
    rows = list(plan.speed.step_ms) if plan.speed else [0]
    return max(count for count in rows if batch is None or count <= batch)


def cheapest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fitting candidate with the lowest price per hour; None if none fits and has a price."""
    fitting = [x for x in candidates if x.plan is not None and x.plan.fits and x.usd_per_hour is not None]
    return min(fitting, key=lambda x: x.usd_per_hour or 0, default=None)
