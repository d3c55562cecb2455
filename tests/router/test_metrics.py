"""What passes through the metered Frontend is counted, and nothing of it is changed."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest
from scripted_frontend import USAGE, ScriptedFrontend

from kvhive.proto.errors import InvalidRequest, Overloaded, Unavailable
from kvhive.router.frontend import GenerationEvent
from kvhive.router.metrics import MeteredFrontend, RequestMetrics
from kvhive.router.request import GenerateRequest, TextPrompt


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
