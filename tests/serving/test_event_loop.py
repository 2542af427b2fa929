"""What a process asks of the system before it serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serving.event_loop import SWITCH_INTERVAL_S, TIMER_SLACK_NS

ASK = """
import ctypes, sys, threading
from serving.event_loop import prepare_to_serve

PR_GET_TIMERSLACK = 30
prepare_to_serve()
print(sys.getswitchinterval())
asks = threading.Thread(target=lambda: print(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK)))
asks.start()
asks.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such slack")
def test_threads_that_are_started_later_wake_up_when_they_asked_to() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    interval_s, slack_ns = asked.stdout.split()
    assert float(interval_s) == pytest.approx(SWITCH_INTERVAL_S)
    assert int(slack_ns) == TIMER_SLACK_NS
