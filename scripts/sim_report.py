"""What a simulation says: one row of numbers per policy, beside what no policy can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvhive.scripts.sim_limits import Limits
from kvhive.scripts.sim_run import Outcome, Served


@dataclass(frozen=True, slots=True)
class Goal:
    """What counts as served well."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy's numbers. Of requests that no pool could hold, only their count."""

    policy: str
    requests: int
    refused: int
    """Too large for any pool; in no other number."""
    token_hit_rate: float
    """Prompt tokens found in the chosen worker's cache, of all."""
    reachable_hit_rate: float
    """... that the router's index knew on some worker when the request came."""
    infinite_hit_rate: float
    """... that one cache without bounds would have had."""
    belady_hit_rate: float
    """... that one cache of all pools' size, which knows the future, would have had."""
    pooled_hit_rate: float
    """... that one shared LRU cache of that size would have had."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    pooled_ttft_mean_s: float
    """With one queue and the shared cache."""
    pooled_ttft_p99_s: float
    tpot_mean_s: float
    """Seconds per output token after the first, mean over requests with more than one."""
    tpot_p99_s: float
    goodput_rps: float
    """Requests per second that met both goals."""
    goodput_share: float
    """Requests that met both goals, of all."""
    imbalance: float
    """Busy seconds of the busiest worker over the mean."""
    least_requests_share: float
    """Requests of the worker that got the fewest, over an even share."""
    evictions: int
    preemptions: int
    transfers: int
    """Blocks moved between workers: none yet."""
    duration_s: float
    """Virtual seconds until the last answer."""
    offered_load: float
    """Prefill demand without a cache over what the fleet can compute."""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            name: round(value, 9) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * len(ordered) * 1e6) // 1_000_000) - 1)] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0


def report(policy: str, outcome: Outcome, limits: Limits, goal: Goal, offered_load: float) -> PolicyReport:
    """Sum up a simulation."""
    done = [served for served in outcome.served if not served.refused]
    prompts = max(1, sum(served.prompt_tokens for served in done))
    ttft = [served.first_token_at - served.arrived_at for served in done]
    tpot = [_tpot_s(served) for served in done if served.output_tokens > 1]
    duration = max((served.finished_at for served in done), default=0.0)
    good = sum(
        served.first_token_at - served.arrived_at <= goal.ttft_s and _tpot_s(served) <= goal.tpot_s
        for served in done
    )
    busy = [worker.busy_s for worker in outcome.workers]
    counts = dict.fromkeys((worker.worker_id for worker in outcome.workers), 0)
    for served in done:
        counts[served.worker_id] += 1
    return PolicyReport(
        policy=policy,
        requests=len(outcome.served),
        refused=len(outcome.served) - len(done),
        token_hit_rate=sum(served.cached_tokens for served in done) / prompts,
        reachable_hit_rate=sum(served.reachable_tokens for served in done) / prompts,
        infinite_hit_rate=limits.infinite_hit_rate,
        belady_hit_rate=limits.belady_hit_rate,
        pooled_hit_rate=limits.pooled.hit_rate,
        ttft_mean_s=mean(ttft),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        pooled_ttft_mean_s=mean(limits.pooled.ttft_s),
        pooled_ttft_p99_s=quantile(limits.pooled.ttft_s, 0.99),
        tpot_mean_s=mean(tpot),
        tpot_p99_s=quantile(tpot, 0.99),
        goodput_rps=good / duration if duration else 0.0,
        goodput_share=good / max(1, len(done)),
        imbalance=max(busy) / mean(busy) if any(busy) else 1.0,
        least_requests_share=min(counts.values()) * len(counts) / max(1, len(done)),
        evictions=sum(worker.evictions for worker in outcome.workers),
        preemptions=sum(worker.scheduler.preemptions for worker in outcome.workers),
        transfers=0,
        duration_s=duration,
        offered_load=offered_load,
    )


def _tpot_s(served: Served) -> float:
    return (served.finished_at - served.first_token_at) / max(1, served.output_tokens - 1)


_COLUMNS = (
    ("policy", "policy", "{:<18}"),
    ("hit %", "token_hit_rate", "{:>7.2%}"),
    ("reach %", "reachable_hit_rate", "{:>8.2%}"),
    ("TTFT mean", "ttft_mean_s", "{:>10.3f}"),
    ("p50", "ttft_p50_s", "{:>8.3f}"),
    ("p90", "ttft_p90_s", "{:>8.3f}"),
    ("p99 s", "ttft_p99_s", "{:>8.3f}"),
    ("TPOT ms", "tpot_mean_s", "{:>8.1f}"),
    ("good %", "goodput_share", "{:>7.1%}"),
    ("imbal.", "imbalance", "{:>7.2f}"),
    ("evicted", "evictions", "{:>10}"),
    ("preempt.", "preemptions", "{:>9}"),
)


def table(reports: Sequence[PolicyReport], decision_us: dict[str, float]) -> list[str]:
    """Lines for a person: policies, best mean TTFT first, then the limits."""
    widths = [len(form.format("" if "<" in form else 0)) for _, _, form in _COLUMNS]
    head = "".join(
        f"{title:<{width}}" if title == "policy" else f"{title:>{width}}"
        for (title, _, _), width in zip(_COLUMNS, widths, strict=True)
    )
    lines = [f"{head}{'us/decision':>13}"]
    for each in sorted(reports, key=lambda row: row.ttft_mean_s):
        cells = []
        for _, name, form in _COLUMNS:
            value = getattr(each, name)
            cells.append(form.format(value * 1000 if name == "tpot_mean_s" else value))
        lines.append(f"{''.join(cells)}{decision_us[each.policy]:>13.0f}")
    any_ = reports[0]
    lines += [
        "",
        f"limits: infinite cache {any_.infinite_hit_rate:.2%} · Belady {any_.belady_hit_rate:.2%} · "
        f"pooled {any_.pooled_hit_rate:.2%}, TTFT mean {any_.pooled_ttft_mean_s:.3f} s, "
        f"p99 {any_.pooled_ttft_p99_s:.3f} s",
        f"{any_.requests} requests, {any_.refused} too large for a pool; "
        f"offered load {any_.offered_load:.2f} of the prefill capacity, without a cache",
    ]
    return lines
