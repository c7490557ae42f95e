"""The clock of who may have been stopped."""

from wfm_ds.transport.clock import MAX_STEP_S, ActiveClock


def test_it_goes_with_the_time_and_stands_still_while_nobody_looks():
    clock = ActiveClock(100.0)
    assert clock.now_s == 100.0
    assert [clock.tick(now_s) for now_s in (100.5, 101.0)] == [100.5, 101.0]
    assert clock.tick(1000.0) == 101.0 + MAX_STEP_S
    assert clock.tick(1000.5) == 101.5 + MAX_STEP_S == clock.now_s
