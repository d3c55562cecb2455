"""A stateful property test: whatever is submitted, cancelled and cleared, the pool's promises hold."""

from __future__ import annotations

from engine_rig import Rig
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from pool_accounting import PoolAccounting

ENOUGH_STEPS = 20_000


def test_the_promises_hold_over_many_steps_of_random_traffic() -> None:
    """Exact accounting, closed prefixes, kept leases, true tokens, and an end for everybody."""
    PoolAccounting.steps = 0
    patient = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    while PoolAccounting.steps < ENOUGH_STEPS:  # how long an example is, is random too
        run_state_machine_as_test(PoolAccounting, settings=patient)


def test_a_pool_is_reported_before_the_first_step() -> None:
    """A worker that registers before its engine's thread has run is not believed to have no pool."""
    rig = Rig(blocks=32)
    rig.engine.calibrate((16,))
    assert (rig.engine.load.blocks_total, rig.engine.load.blocks_free) == (32, 32)
