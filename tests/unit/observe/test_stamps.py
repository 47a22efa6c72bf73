"""Stamps of a device: events are read after the step, and nothing waits for them before."""

from __future__ import annotations

from unittest import mock

import pytest

from pipegrad.observe.step_recorder import DeviceStamps, HostStamps
from tests.support.devices import Device


def made(device: Device) -> DeviceStamps:
    return DeviceStamps(device.make, device.record, device.synchronize)


def test_stamps_are_read_by_the_hosts_clock_after_the_device_was_waited_for() -> None:
    device = Device()
    taker = made(device)
    first, second, third = (taker.now() for _ in range(3))
    assert device.waits == 0
    with mock.patch("pipegrad.observe.step_recorder.time.perf_counter", return_value=50.0):
        taker.settle()
    assert device.waits == 2
    # The last event of all is at 50 s; each one before it 0.5 s earlier.
    assert taker.seconds([first, second, third]) == [48.5, 49.0, 49.5]
    assert taker.seconds([]) == []


def test_a_stamp_that_was_not_reached_is_not_read() -> None:
    taker = made(Device())
    taker.settle()
    with pytest.raises(RuntimeError, match="not reached"):
        taker.seconds([taker.now()])


def test_events_that_nobody_will_read_are_used_again() -> None:
    device = Device()
    taker = made(device)
    events = [taker.now(), taker.now()]
    taker.recycle(events)
    again = [taker.now(), taker.now()]
    assert device.made == 2
    assert {id(e) for e in again} == {id(e) for e in events}
    assert taker.now() not in events
    assert device.made == 3


def test_stamps_of_a_host_are_its_clock() -> None:
    taker = HostStamps()
    with mock.patch("pipegrad.observe.step_recorder.time.perf_counter", return_value=3.0):
        assert HostStamps().now() == 3.0
    taker.settle()
    assert taker.seconds([1.0, 2.0]) == [1.0, 2.0]
