from __future__ import annotations

from bench.kv_stamps import Stamps, table

DONE = ("told", "heard", "sent", "posted", "scattered", "sent", "posted", "scattered", "landed")


def stamps_from(began_s: float, step_s: float) -> Stamps:
    return [(done, began_s + step_s * (1 + n)) for n, done in enumerate(DONE)]


def test_stamps_belong_to_the_push_during_which_they_were_taken() -> None:
    late = ("scattered", 6.00001)  # Of the first push, at an end that had still to be told.
    taken = [*stamps_from(5.0, 1e-5), late, *stamps_from(6.0, 3e-5), ("told", 7.0)]
    pushes = {"nccl": [(5.0, 5.001), (6.0, 6.001)], "nixl": [(7.0, 7.1)]}
    (line,) = table(pushes, taken).splitlines()
    figures = {"told": 20, "heard": 40, "sent": 60, "posted": 80, "first": 100, "last": 160}
    figures |= {"landed": 180, "seen": 1000}
    shown = [word for done, at_us in figures.items() for word in (done, str(at_us))]
    assert line.split() == ["nccl", *shown, "us,", "2", "pushes"]
