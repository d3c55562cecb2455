"""What a router keeps per request does not stay: after many different prompts it holds what is in flight."""

from __future__ import annotations

from placing_rig import PlacedFleet, cold_prompt


def test_thousands_of_different_prompts_leave_only_predictions_that_expire() -> None:
    fleet = PlacedFleet(workers=4)
    state = fleet.states[0]
    for i in range(3000):
        fleet.send(cold_prompt(i, 128))
        fleet.clock.now += 0.1
        if i % 10 == 9:
            fleet.complete()
            fleet.report()
    assert not state.loads._reservations and not state.loads._worker_of and len(state.predicted) == 0
    assert state.predicted._entries <= 8 * 310, "those of the last 30 s"
    for worker_id in ("w0", "w1", "w2", "w3"):
        fleet.leave(worker_id)
    assert not state.loads._cold and not state.predicted._of_worker
