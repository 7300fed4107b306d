"""Several targets side by side, and what they cost."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.planner.plan import Plan
from jaxserve.planner.targets import KINDS, Target, parse_target

Prices = Mapping[str, float]  # in dollars per chip and hour, by kind


@dataclass(frozen=True)
class Candidate:
    """One target of a sweep.

    Attributes:
        target: that was tried.
        plan: of the model on it; None where it could not be planned.
        reason: why not.
        usd_per_hour: of all its chips; None without a price.
        num_rows: of the decode step that is compared: as many as were asked for, or else as fit.
    """

    target: Target
    plan: Plan | None
    reason: str | None
    usd_per_hour: float | None
    num_rows: int = 0

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Of output, at best: while every step has `num_rows` rows."""
        if self.usd_per_hour is None or self.plan is None or self.plan.speed is None:
            return None
        return self.usd_per_hour / 3600 / self.plan.speed.tokens_per_s[self.num_rows] * 1e6


def read_prices(path: str) -> Prices:
    """Dollars per chip and hour from a TOML file of `kind = price`.

    Raises:
        ConfigError: it is not such a file.
    """
    try:
        with open(path, "rb") as file:
            prices = tomllib.load(file)
    except ValueError as error:
        raise ConfigError(f"{path} must be TOML, but: {error}") from error
    for kind, price in prices.items():
        if kind not in KINDS or isinstance(price, bool) or not isinstance(price, int | float) or price <= 0:
            raise ConfigError(
                f"{path} must have lines of a chip, one of {list(KINDS)}, and its price in dollars per hour, as "
                f"{KINDS[0]} = 3.5, got {kind} = {price!r}"
            )
    return prices


def sweep(
    names: Iterable[str], make: Callable[[Target], Plan], *, prices: Prices, batch: int | None
) -> Iterable[Candidate]:
    """Plans one target after the other; one that cannot be planned does not end it.

    Args:
        names: of targets.
        make: plans one.
        prices: of those kinds that have one.
        batch: rows to compare decode steps of, where as many fit.

    Raises:
        ConfigError: a name is not that of a target.
    """
    for target in [parse_target(name) for name in names]:
        price = prices.get(target.kind)
        usd_per_hour = None if price is None else price * target.num_chips
        try:
            plan = make(target)
        except ConfigError as error:
            yield Candidate(target, None, str(error), usd_per_hour)
        else:
            yield Candidate(target, plan, None, usd_per_hour, _num_rows(plan, batch))


def _num_rows(plan: Plan, batch: int | None) -> int:
    rows = list(plan.speed.step_ms) if plan.speed else [0]
    return max(count for count in rows if batch is None or count <= batch)


def cheapest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The least dollars per hour of those that fit; None where none does, or none has a price."""
    fitting = [x for x in candidates if x.plan is not None and x.plan.fits and x.usd_per_hour is not None]
    return min(fitting, key=lambda x: x.usd_per_hour or 0, default=None)
