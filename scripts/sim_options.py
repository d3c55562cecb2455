"""The words of `kvhive simulate`: its fleet, its pace and its goals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from kvhive.proto.errors import ConfigError
from kvhive.scripts.sim_costs import CostModel

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_POOL_TOKENS = 500_000


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """All of them but where the result goes."""

    workers: int = 8
    policies: str = "all"
    capacity_blocks: int = 0
    capacity_tokens: int = 0
    capacity_share: float = 0.0
    """Of the trace's distinct blocks over the number of workers."""
    rate: float = 1.0
    """Times the native rate."""
    load: float = 0.0
    """Instead of a rate: the share of the fleet's prefill capacity that is asked for, without a cache."""
    limit: int = 0
    seed: int = 0
    index_lag_s: float = 0.0
    block_size: int = 16
    cost: CostModel = CostModel()  # noqa: RUF009 - frozen
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.05
    autoscale: bool = False
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, of the section `autoscaling`."""
    startup_s: float = 60.0
    window_s: float = 0.0
    """Of the clairvoyant minimum; 0: none."""
    quick: bool = False
    coarse: float = 1.0

    def pool_blocks(self, distinct_tokens: int) -> int:
        """The size of each worker's pool for a trace of so many distinct tokens. Raises ConfigError."""
        given = [self.capacity_blocks, self.capacity_tokens, self.capacity_share]
        if sum(map(bool, given)) > 1:
            raise ConfigError("give one of --capacity-blocks, --capacity-tokens and --capacity-share")
        tokens = self.capacity_tokens or DEFAULT_POOL_TOKENS
        if self.capacity_share:
            tokens = int(self.capacity_share * distinct_tokens / self.workers)
        return self.capacity_blocks or tokens // self.block_size


def simulate_flags(command: F) -> F:
    """Give a command the options above, as one argument `options: SimulateOptions`."""

    @functools.wraps(command)
    def parsed(rate: str, load: float, **flags: Any) -> Any:
        mine = {name: flags.pop(name) for name in _NAMES if name in flags}
        cost = CostModel(
            prefill_tokens_per_s=flags.pop("prefill_tokens_per_s"),
            step_base_s=flags.pop("step_ms") / 1000,
            per_attention_s=flags.pop("attention_ns") / 1e9,
            max_step_tokens=flags.pop("max_step_tokens"),
            max_running=flags.pop("max_running"),
        )
        if load and rate != "native":
            raise ConfigError("--load: cannot be given together with --rate")
        return command(options=SimulateOptions(rate=_rate(rate), load=load, cost=cost, **mine), **flags)

    for flag in reversed(_FLAGS):
        parsed = flag(parsed)
    return parsed  # type: ignore[return-value]


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        rate = 1.0 if text == "native" else float(text)
        if 1e-6 <= rate <= 1e6:
            return rate
    raise ConfigError(f"--rate: must be native or a factor of 1e-6 to 1e6, is {text!r}")


def _flag(*names: str, kind: click.ParamType[Any], default: Any, text: str, shown: bool = True) -> Any:
    return click.option(*names, type=kind, default=default, show_default=shown, help=text)


_NAMES = SimulateOptions.__dataclass_fields__.keys() - {"rate", "load", "cost"}
_SHARE = click.FloatRange(0, 100)
_SECONDS = click.FloatRange(0, 86_400)
_FLAGS = (
    _flag("--workers", kind=click.IntRange(1, 4096), default=8, text="How many."),
    _flag("--policy", "policies", kind=click.STRING, default="all", text="Which, with commas between."),
    _flag("--capacity-blocks", kind=click.IntRange(0), default=0, text="Each worker's pool.", shown=False),
    _flag(
        "--capacity-tokens",
        kind=click.IntRange(0),
        default=0,
        text=f"... in tokens.  [default: {DEFAULT_POOL_TOKENS}]",
        shown=False,
    ),
    _flag(
        "--capacity-share",
        kind=_SHARE,
        default=0.0,
        text="... as a share of the trace's distinct blocks over the number of workers.",
        shown=False,
    ),
    _flag("--rate", kind=click.STRING, default="native", text="How fast to play: native, or a factor."),
    _flag(
        "--load",
        kind=_SHARE,
        default=0.0,
        text="... or at this share of the fleet's prefill capacity, counted without a cache.",
        shown=False,
    ),
    _flag("--limit", kind=click.IntRange(0), default=0, text="Only the first requests; 0: all."),
    _flag("--seed", kind=click.IntRange(0, 2**63), default=0, text="Of all that is random, homes included."),
    _flag("--index-lag", "index_lag_s", kind=click.FloatRange(0, 3600), default=0.0, text="Seconds."),
    _flag("--block-size", kind=click.IntRange(1, 65_536), default=16, text="Tokens of a block."),
    _flag("--prefill-tokens-per-s", kind=click.FloatRange(1, 1e9), default=15_000.0, text="Each worker's."),
    _flag("--step-ms", kind=click.FloatRange(1e-3, 1e6), default=8.0, text="What a step costs at least."),
    _flag("--attention-ns", kind=click.FloatRange(0, 1e6), default=1.3, text="A (token, context token)."),
    _flag("--max-step-tokens", kind=click.IntRange(1), default=2048, text="Of one step."),
    _flag("--max-running", kind=click.IntRange(1), default=256, text="Sequences of one step."),
    _flag("--slo-ttft", "slo_ttft_s", kind=click.FloatRange(0), default=2.0, text="Seconds, the goal."),
    _flag("--slo-tpot", "slo_tpot_s", kind=click.FloatRange(0), default=0.05, text="Seconds, for goodput."),
    click.option("--autoscale", is_flag=True, help="Let workers come and go (docs/autoscaling.md)."),
    click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="... by this autoscaling.* setting."
    ),
    _flag("--startup", "startup_s", kind=_SECONDS, default=60.0, text="Seconds until a worker serves."),
    _flag("--window", "window_s", kind=_SECONDS, default=0.0, text="Of the clairvoyant minimum; 0: none."),
    click.option("--quick", is_flag=True, help="A queue per worker, for days of `diurnal`."),
    _flag("--coarse", kind=click.FloatRange(1, 100), default=1.0, text="Fewer reports, longer steps."),
)
