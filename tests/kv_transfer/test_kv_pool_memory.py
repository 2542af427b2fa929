"""What a transport refuses of a pool, and how it names the way there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kv_transfer.transports.factory import make_transport
from kv_transfer.transports.nixl import path_name
from kv_transfer.transports.pool import in_expandable_segment
from kv_transfer.types import PageGroup, TransportError

SEGMENTS = [
    {"address": 1 << 20, "total_size": 1 << 20, "is_expandable": True},
    {"address": 1 << 30, "total_size": 1 << 24, "is_expandable": False},
    {"address": 1 << 31, "total_size": 1 << 24},  # of a torch that knows no such thing
]
MAKE_TRANSPORT = """
import torch
from kv_transfer.transports.factory import make_transport
from kv_transfer.types import TransportError, PageGroup

pool = torch.zeros(64, 1 << 20, dtype=torch.uint8, device="cuda")
try:
    make_transport("nixl", "alone", pool, [PageGroup(1 << 20, 64)]).shutdown()
except TransportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("address", "expandable"),
    [
        ((1 << 20) - 1, False),
        (1 << 20, True),
        ((2 << 20) - 1, True),
        (2 << 20, False),
        ((1 << 30) + 5, False),
        ((1 << 31) + 5, False),
    ],
)
def test_expandable_segments_are_told_by_address(address: int, expandable: bool) -> None:
    assert in_expandable_segment(address, SEGMENTS) == expandable


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("backend:cudaMallocAsync", True),
    ],
)
def test_a_pool_that_no_other_process_can_map_is_refused(setting: str, refused: bool) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    done = subprocess.run(
        [sys.executable, "-c", MAKE_TRANSPORT],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("bad_pool" in done.stdout) == refused
    assert ("PYTORCH_CUDA_ALLOC_CONF" in done.stdout) == refused


@pytest.mark.parametrize(
    ("allowed", "same_host", "on_gpus", "name"),
    [
        ("all", True, False, "nixl/shm"),
        ("all", True, True, "nixl/cuda_ipc"),
        ("all", False, True, "nixl/net"),
        ("^cma", True, False, "nixl/shm"),
        ("tcp", True, False, "nixl/tcp"),
        ("tcp,self", False, False, "nixl/tcp"),
        ("tcp,cuda_copy", True, True, "nixl/tcp"),
        ("tcp,cuda", True, True, "nixl/cuda_ipc"),
        ("tcp,sm", True, False, "nixl/shm"),
        ("tcp,sm", True, True, "nixl/net"),
        ("rc,tcp", True, False, "nixl/net"),
        ("rc,tcp,sm", False, False, "nixl/net"),
    ],
)
def test_a_path_is_not_named_after_what_is_ruled_out(
    allowed: str, same_host: bool, on_gpus: bool, name: str
) -> None:
    assert path_name(allowed, same_host, on_gpus) == name


def test_variables_of_ucx_are_named_where_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come from the environment of another program."""

    def fails(*_: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr("kv_transfer.transports.nixl.NixlTransport._new_agent", fails)
    monkeypatch.setenv("UCX_NET_DEVICES", "nope0")
    pool = torch.zeros(64, 64, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"nixl_failed: RuntimeError; .*UCX_NET_DEVICES=nope0"):
        make_transport("nixl", "alone", pool, [PageGroup(64, 64)])
