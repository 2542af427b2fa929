"""Channels whose other end is found and then goes no further: it dies, stands still, or its library
never comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from kv_world import PAGE_TOKENS, a_world
from waiting import wait_until

from kv_transfer.events import Delivered, Sent
from kv_transfer.nccl import channels, groups
from kv_transfer.nccl.channels import Channel, ReceiveChannel, SendChannel
from kv_transfer.nccl.staging import ChannelOptions, Segment
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageGroup

SOON = timedelta(seconds=2)
POOL = PoolMemory.of(torch.zeros(4, 64, dtype=torch.uint8), [PageGroup(64, 4)])
OPTIONS = ChannelOptions(segment_bytes=64)
STOPS_HALF_WAY = """
import sys, time, torch
from kv_transfer.nccl import channels
from kv_transfer.nccl.staging import ChannelOptions
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageGroup

def stop(*_):
    print("met", flush=True)
    time.sleep(600)

channels.form_group = stop
pool = PoolMemory.of(torch.zeros(4, 64, dtype=torch.uint8), [PageGroup(64, 4)])
if sys.argv[1:]:
    channels.ReceiveChannel("in", pool, sys.argv[1], ChannelOptions(segment_bytes=64))
else:
    print(channels.SendChannel("out", pool, ChannelOptions(segment_bytes=64)).address, flush=True)
time.sleep(600)
"""


@contextmanager
def half_way(end: type[Channel]) -> Iterator[tuple[Channel, subprocess.Popen[str]]]:
    """A channel's end here, which has met the other one in a process that stops there."""
    command = [sys.executable, "-c", STOPS_HALF_WAY]
    if end is SendChannel:
        channel: Channel = SendChannel("out", POOL, OPTIONS)
        command.append(channel.address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        if end is ReceiveChannel:
            channel = ReceiveChannel("in", POOL, peer.stdout.readline().strip(), OPTIONS)
        assert peer.stdout.readline() == "met\n"
        try:
            yield channel, peer
        finally:
            channel.close()
            peer.kill()


def is_over(channel: Channel) -> bool:
    """As the transport sees it, which looks for what landed all the time."""
    channel.landed()
    return channel.is_over if isinstance(channel, SendChannel) else channel.failed


@pytest.mark.parametrize(("end", "is_killed"), [(SendChannel, False), (ReceiveChannel, True)])
def test_a_peer_that_goes_no_further_than_the_rendezvous_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, end: type[Channel], is_killed: bool
) -> None:
    monkeypatch.setattr(channels, "CONNECT_S", SOON)
    with half_way(end) as (channel, peer):
        assert not is_over(channel)
        if is_killed:
            peer.kill()
        wait_until(lambda: is_over(channel))
        wait_until(lambda: not channel._thread.is_alive())
        wait_until(lambda: not forming(), show=threading.enumerate)
        assert (peer.poll() is not None) == is_killed


def forming() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-form"]


class Group:
    """Of a library that comes back too late."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_a_library_that_never_comes_back_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, group = threading.Event(), Group()

    def stuck(*_: object) -> Any:
        goes_on.wait()
        return group

    monkeypatch.setattr(groups, "make_group", stuck)
    monkeypatch.setattr(groups, "_connect", lambda *_: None)
    monkeypatch.setattr(channels, "CONNECT_S", SOON)
    sender = SendChannel("out", POOL, OPTIONS)
    receiver = ReceiveChannel("in", POOL, sender.address, OPTIONS)
    began_s = time.monotonic()
    for channel in (sender, receiver):
        wait_until(lambda channel=channel: is_over(channel))
        channel.close()
    assert time.monotonic() - began_s > SOON.total_seconds() / 2
    assert forming()
    goes_on.set()
    wait_until(lambda: not forming())
    assert group.aborted, "what it formed after all is left open"


def test_a_lane_that_is_formed_waits_longer_than_forming_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a peer that stands still: Gloo gives up after the time that connecting has."""
    monkeypatch.setattr(channels, "CONNECT_S", SOON)
    move, stood_still = ReceiveChannel._move, []

    def late(self: ReceiveChannel, segment: Segment) -> None:
        if not stood_still:
            stood_still.append(segment)
            time.sleep(1.3 * SOON.total_seconds())
        move(self, segment)

    with a_world("nccl") as world:
        monkeypatch.setattr(ReceiveChannel, "_move", late)
        transfer = world.sent(3 * PAGE_TOKENS)
        world.until(lambda: bool(world.decode.of(Delivered) and world.prefill.of(Sent)))
        transfer.assert_delivered()
    assert stood_still
