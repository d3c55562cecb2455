"""What passes through the metered Frontend is counted, and nothing of it is changed."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest
from scripted_frontend import REFUSALS, USAGE, ScriptedFrontend

from kvhive.proto.errors import InvalidRequest, NotNow, Overloaded, TimedOut, Unavailable
from kvhive.router.dispatch_counters import DispatchCollector, DispatchCounters
from kvhive.router.frontend import GenerationEvent, KeptPrefix
from kvhive.router.metrics import MeteredFrontend, RequestMetrics
from kvhive.router.request import GenerateRequest, PromptPin, TextPrompt


class Metered:
    """A metered frontend, its clock and its counts."""

    def __init__(self, frontend: ScriptedFrontend) -> None:
        self.now = 100.0
        self.metrics = RequestMetrics()
        self.frontend = MeteredFrontend(frontend, self.metrics, lambda: self.now)

    async def run(self, text: str, seconds_each: float = 0.0) -> list[GenerationEvent]:
        events = []
        async with aclosing(self.frontend.generate(GenerateRequest(TextPrompt(text)))) as stream:
            async for event in stream:
                events.append(event)
                self.now += seconds_each
        return events

    def counts(self) -> dict[str, float]:
        """Every sample above zero, as Prometheus spells it, without times of creation and buckets."""
        return {
            sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.value and not sample.name.endswith(("_created", "_bucket"))
        }


@pytest.fixture
def metered(frontend: ScriptedFrontend) -> Metered:
    return Metered(frontend)


def test_a_replicated_prefix_is_counted_by_what_was_computed_a_second_time() -> None:
    metrics = RequestMetrics()
    usage = replace(USAGE, route_reason="replica", reachable_tokens=64, cached_tokens=16)
    metrics.count(usage, "stop", 0.1)
    metrics.count(replace(usage, route_reason="prefix"), "stop", 0.1)
    assert metrics.tokens.labels("replicated")._value.get() == 48
    assert metrics.routed.labels("replica")._value.get() == 1


async def test_pins_are_counted_by_what_became_of_them(metered: Metered) -> None:
    """Of what is generated and of what is prewarmed, each breakpoint once."""
    kept = KeptPrefix(16, 60.0, True), KeptPrefix(0, 60.0, False, "below_minimum")
    metered.metrics.count(replace(USAGE, kept=kept, not_kept="below_minimum"), "stop", 0.1)
    request = GenerateRequest(TextPrompt("say"), pins=(PromptPin(60.0), PromptPin(600.0)))
    await metered.frontend.prewarm(request, 2)
    counts = {name: count for name, count in metered.counts().items() if "pins" in name}
    assert counts == {
        "kvhive_pins_total,outcome=kept": 3,
        "kvhive_pins_total,outcome=below_minimum": 1,
        "kvhive_pins_total,outcome=over_budget": 2,
    }


async def test_a_request_that_ends_well_is_counted_once(frontend: ScriptedFrontend, metered: Metered) -> None:
    """Each count under its own name; the first token is timed from arrival, later ones change nothing."""
    plain = [event async for event in frontend.generate(GenerateRequest(TextPrompt("say a b")))]
    assert await metered.run("say a b", seconds_each=0.25) == plain
    counts = metered.counts()
    assert counts.pop("kvhive_ttft_seconds_sum,cache=hit") == pytest.approx(0.25)
    assert counts == {
        "kvhive_requests_started_total,worker=w1": 1,
        "kvhive_requests_finished_total,reason=stop,worker=w2": 1,
        "kvhive_requests_routed_total,reason=prefix": 1,
        "kvhive_tokens_total,kind=prompt": USAGE.prompt_tokens,
        "kvhive_tokens_total,kind=cached": USAGE.cached_tokens,
        "kvhive_tokens_total,kind=completion": USAGE.completion_tokens,
        "kvhive_ttft_seconds_count,cache=hit": 1,
    }


@pytest.mark.parametrize(
    ("text", "error", "started"),
    [
        ("refuse bad", InvalidRequest, 0),
        ("refuse busy", Overloaded, 0),
        ("refuse down", Unavailable, 0),
        ("break a", Unavailable, 1),
    ],
)
async def test_errors_are_counted_by_name_and_passed_on(
    metered: Metered, text: str, error: type[Exception], started: int
) -> None:
    with pytest.raises(error):
        await metered.run(text)
    counts = metered.counts()
    assert counts.pop("kvhive_requests_started_total,worker=w1", 0) == started
    retryable = {"kvhive_requests_refused_total,cause=other": 1} if error is not InvalidRequest else {}
    assert counts == {f"kvhive_requests_failed_total,error={error.__name__}": 1} | retryable


async def test_a_generation_that_is_closed_is_neither_finished_nor_failed(
    frontend: ScriptedFrontend, metered: Metered
) -> None:
    stream = metered.frontend.generate(GenerateRequest(TextPrompt("hang a")))
    await anext(stream)
    assert frontend.active == 1
    await stream.aclose()
    assert frontend.active == 0, "closing reaches the inner generator"
    assert metered.counts() == {"kvhive_requests_started_total,worker=w1": 1}


async def test_all_else_is_passed_through(frontend: ScriptedFrontend, metered: Metered) -> None:
    assert metered.frontend.models() == frontend.models()
    frontend.is_ready = False
    assert metered.frontend.ready() is False
    assert await metered.frontend.tokenize(TextPrompt("say abc"), "demo") == [3]


@pytest.mark.parametrize(
    ("error", "sample"),
    [
        (Overloaded("full", cause="queues_full"), "kvhive_requests_refused_total,cause=queues_full"),
        (Unavailable("none", cause="no_worker"), "kvhive_requests_refused_total,cause=no_worker"),
        (TimedOut("late", cause="deadline"), "kvhive_timeouts_total,cause=deadline"),
    ],
)
async def test_refusals_and_timeouts_are_counted_by_cause(
    metered: Metered, monkeypatch: pytest.MonkeyPatch, error: NotNow, sample: str
) -> None:
    monkeypatch.setitem(REFUSALS, "busy", error)
    with pytest.raises(type(error)):
        await metered.run("refuse busy")
    assert metered.counts()[sample] == 1


async def test_what_was_predicted_is_set_beside_what_came_true(
    frontend: ScriptedFrontend, metered: Metered
) -> None:
    """Predicted when it was placed, true when the first token came: twice as late is a ratio of one half."""
    frontend.predicted_ttft_s = 0.5
    await metered.run("say a b", seconds_each=1.0)
    counts = metered.counts()
    assert counts["kvhive_ttft_ratio_count"] == 1
    assert counts["kvhive_ttft_ratio_sum"] == pytest.approx(0.5)
    frontend.predicted_ttft_s = 0.0
    await metered.run("say a b", seconds_each=1.0)
    assert metered.counts()["kvhive_ttft_ratio_count"] == 1, "without a prediction there is nothing to judge"


def test_what_the_dispatcher_counts_is_read_when_it_is_asked_for(metered: Metered) -> None:
    counters, now = DispatchCounters(), {"in_flight": 3, "held": 2}
    collector = DispatchCollector(counters, lambda: now["in_flight"], lambda: now["held"])
    metered.metrics.registry.register(collector)
    counters.failovers["connection"] += 2
    counters.failovers["stopping"] += 1
    counters.passes, counters.held = 4, 5
    assert metered.counts() == {
        "kvhive_failovers_total,cause=connection": 2,
        "kvhive_failovers_total,cause=stopping": 1,
        "kvhive_requests_passed_on_total": 4,
        "kvhive_requests_held_total": 5,
        "kvhive_requests_in_flight": 3,
        "kvhive_requests_waiting_for_worker": 2,
    }
    now["held"] = 0
    assert "kvhive_requests_waiting_for_worker" not in metered.counts()
