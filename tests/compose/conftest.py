"""One host for all tests of this folder: its start takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compose_kit import GPUS, VARIABLES, Host
from tiny_models import write_tiny_model


@pytest.fixture(scope="package")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A router, a prefill and a decode worker that are healthy, on a host with four GPUs."""
    folder = tmp_path_factory.mktemp("host")
    host = Host(folder, GPUS, **VARIABLES)
    write_tiny_model(folder / "models" / "tiny")
    try:
        router = host.up("router")
        router.wait_logged("router serves")
        host.healthy_alone = router.is_healthy()
        first = [host.up("prefill"), host.up("decode")]
        for container in first:
            container.wait_healthy()
        router.wait_healthy()
        yield host
    finally:
        host.down()
