"""How many workers each signal asks for, and how much room the TTFT goal takes beside the work.

    prefill   work + headroom x (queueing + doubt), and no more than `target_utilization` of the workers
    backlog   what is queued beyond half of the goal's slack, worked off within goal and start-up together
    slots     running sequences over the slots of a worker
    pool      blocks in use over the blocks of a worker

`work` is the forecast over a worker's start-up. `queueing` is how many more workers than work it takes
until hardly anybody waits longer than the slack, that is the goal without a request's own prefill: in heavy
traffic the wait of many servers with one queue is exponential with mean burst / 2 / (workers - work)
(Kingman 1961, Koellerstroem 1974), so with burst x ln(1 / (1 - share)) / 2 / slack of them its quantile is
the slack. `doubt` is the same quantile of what the forecast's level does not know. `headroom` is what
neither formula knows, learnt from the TTFT that was reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from kvhive.proto.autoscaling_config import AutoscalingConfig
from kvhive.router.autoscaling_forecast import Forecast
from kvhive.router.autoscaling_snapshot import FleetSnapshot

LEAST_SLACK = 0.1
"""Of the goal: where a request's own prefill takes nearly all of it, more workers would help no longer."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Workers asked for, by signal."""

    prefill: float = 0.0
    backlog: float = 0.0
    """On top of prefill."""
    slots: float = 0.0
    pool: float = 0.0

    def workers(self) -> int:
        """The whole number of workers that satisfies all."""
        return math.ceil(max(self.prefill + self.backlog, self.slots, self.pool) - 1e-9)


def demand_of(
    config: AutoscalingConfig, snapshot: FleetSnapshot, forecast: Forecast, headroom: float
) -> Demand:
    """Compute what each signal asks for. The snapshot must be sound."""
    startup_s = snapshot.startup_s or config.startup_s
    work = max(forecast.level, forecast.after(startup_s))
    growth = work / forecast.level if forecast.level > 0 else 1.0
    slack_s = max(config.ttft_goal_s - snapshot.request_s, LEAST_SLACK * config.ttft_goal_s)
    queueing = forecast.burst_s() * math.log(1 / (1 - config.ttft_goal_share)) / (2 * slack_s)
    queueing = min(queueing, work)  # where there is little work hardly anybody meets anybody
    doubt = NormalDist().inv_cdf(config.ttft_goal_share) * forecast.doubt()
    serving = snapshot.serving()
    late_s = sum(worker.queued_s for worker in serving) - len(serving) * slack_s / 2
    late_s = max(0.0, late_s) + snapshot.held * snapshot.request_s
    slots = sum(worker.running / worker.most_running for worker in serving if worker.most_running > 0)
    pools = sum(worker.live_share for worker in serving)
    return Demand(
        prefill=max(work / config.target_utilization, work + headroom * (queueing + doubt)),
        backlog=late_s / (config.ttft_goal_s + startup_s),
        slots=growth * slots / config.target_utilization,
        pool=growth * pools / config.target_utilization,
    )
