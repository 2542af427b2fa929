"""Checks this machine: installed packages, permissions of the kernel, free memory and ports."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from console.doctor.finding import Finding, error, ok, warning
from serving.gpu_slots import has_gpu
from serving.installing import install_line
from serving.models import demo_model

MIN_PYTHON: Final = (3, 11)
MIN_SHM_BYTES: Final = 256 << 20
"""UCX keeps its queues there. Containers get 64 MiB by default."""
MIN_MEMLOCK_BYTES: Final = 1 << 30
MIN_DISK_BYTES: Final = 2 << 30
PORTS: Final[Mapping[int, str]] = {
    50051: "clients, gRPC",
    50050: "workers announce themselves",
    8000: "clients, HTTP",
    9090: "the router's metrics",
}
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of torch's allocator; the second is the newer name."""
PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
RDMA_DEVICES: Final = Path("/dev/infiniband")
SHM: Final = Path("/dev/shm")


def check_host() -> Iterator[Finding]:
    """Runs all checks of this machine."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _distributions,
        _torch,
        _allocator,
        _nixl,
        _ucx,
        _shared_memory,
        _locked_memory,
        _tracing,
        _watching,
        _ports,
        _model_cache,
    )
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        yield error("python", found, "Baton needs Python 3.11 or newer")
    else:
        yield ok("python", found)


def _distributions() -> Iterator[Finding]:
    """Both own the package `baton`: the files are those of the one that was installed last."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        client, whole = (metadata.version(name) for name in ("baton-client", "baton-llm"))
        advice = (
            f"pip uninstall baton-client, then {install_line(flags='--force-reinstall --no-deps ')}"
        )
        yield warning("baton-client", f"{client}, beside baton-llm {whole}", advice)


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        advice = f"a router needs none; for workers: {install_line('worker')}"
        yield warning("torch", "not installed", advice)
        return
    import torch

    yield ok("torch", torch.__version__)
    if not torch.cuda.is_available():
        yield from _no_gpu()
        return
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    yield ok("gpu", f"{count} ({', '.join(sorted(names))}), CUDA {torch.version.cuda}")
    yield from _peer_access(count)


def _no_gpu() -> Iterator[Finding]:
    if has_gpu():
        advice = (
            "a driver is there that this torch cannot use: compare nvidia-smi with torch's CUDA"
        )
        yield error("gpu", "the device is there, and torch does not see it", advice)
    else:
        yield ok("gpu", "none: workers run on the CPU")


def _peer_access(count: int) -> Iterator[Finding]:
    from engine.memory import gpus_apart

    if apart := gpus_apart(count):
        advice = (
            "KV between these goes through host memory, and sums of ranks by NCCL: put pairs, and "
            "the ranks of a worker, on GPUs of one NVLink island"
        )
        yield warning("gpu peers", f"no direct access: {', '.join(apart)}", advice)
    elif count > 1:
        yield ok("gpu peers", "every GPU reaches every other one directly")


def _allocator() -> Iterator[Finding]:
    for variable in ALLOCATOR_VARIABLES:
        value = os.environ.get(variable, "")
        words = value.lower().replace(" ", "")
        if "expandable_segments:true" in words or "backend:cudamallocasync" in words:
            advice = "workers on GPUs refuse it: no other process can map such memory"
            yield error(variable, value, advice)


def _nixl() -> Iterator[Finding]:
    try:
        importlib.import_module("nixl_cu13._bindings")
    except ImportError as failed:
        found = f"cannot be imported ({type(failed).__name__})"
        advice = "for workers: pip install nixl-cu13; one process alone needs none"
        yield error("nixl", found, advice)
    else:
        yield ok("nixl", metadata.version("nixl-cu13"))


def _ucx() -> Iterator[Finding]:
    allowed = os.environ.get("UCX_TLS", "all")
    names = allowed.split(",")
    if allowed == "all" or allowed.startswith("^"):
        yield ok("UCX_TLS", allowed)
    elif "tcp" not in names:
        advice = "add tcp: UCX wires peers up with it, whatever moves the pages"
        yield error("UCX_TLS", f"{allowed} leaves out tcp", advice)
    elif names == ["tcp"]:
        advice = "unset it: pages between processes of one host go by TCP, several times slower"
        yield warning("UCX_TLS", "tcp alone", advice)
    else:
        yield ok("UCX_TLS", allowed)


def _shared_memory() -> Iterator[Finding]:
    if not SHM.is_dir():
        yield error("/dev/shm", "is not there", "mount a tmpfs there: UCX needs it on one host")
        return
    free = shutil.disk_usage(SHM).free
    found = f"{free / (1 << 20):,.0f} MiB free"
    if free < MIN_SHM_BYTES:
        advice = "give containers more (docker run --shm-size=1g, an emptyDir of medium Memory)"
        yield warning("/dev/shm", found, advice)
    else:
        yield ok("/dev/shm", found)


def _locked_memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = RDMA_DEVICES.is_dir()
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / (1 << 20):,.0f} MiB"
    if has_rdma and soft != resource.RLIM_INFINITY and soft < MIN_MEMLOCK_BYTES:
        advice = "RDMA pins the KV pool: ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield error("locked memory", found, advice)
    else:
        yield ok(
            "locked memory", found + ("" if has_rdma else "; no RDMA device, so it is not needed")
        )


def _tracing() -> Iterator[Finding]:
    """Checks ptrace: where the kernel allows it, UCX copies between processes directly."""
    try:
        scope = int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        yield ok("ptrace", "not restricted by Yama")
        return
    if scope == 0:
        yield ok("ptrace", "processes of one user may write to each other")
    else:
        advice = "pages on one host may take a slower copy: sysctl kernel.yama.ptrace_scope=0"
        yield warning("ptrace", f"restricted (kernel.yama.ptrace_scope={scope})", advice)


def _watching() -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        advice = "without pidfds a dead peer's pages stay in quarantine until a supervisor speaks"
        yield warning("pidfd", "the kernel has none, or a sandbox forbids it", advice)
    else:
        yield ok("pidfd", "works: a peer's death on this host is proven at once")


def _ports() -> Iterator[Finding]:
    taken = [f"{port} ({use})" for port, use in PORTS.items() if not _is_free(port)]
    if taken:
        advice = "fine if that is your router; else name others (--listen, --http-listen, --admin)"
        yield warning("ports", f"in use: {', '.join(taken)}", advice)
    else:
        yield ok("ports", f"{', '.join(map(str, PORTS))} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _model_cache() -> Iterator[Finding]:
    folder = demo_model.cache_folder()
    standing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(standing).free
    found = f"{folder}, {free / (1 << 30):,.0f} GiB free"
    if not os.access(standing, os.W_OK):
        advice = "set BATON_CACHE to a folder that can be written, or name models by their folder"
        yield warning("model cache", f"{folder} cannot be written", advice)
    elif free < MIN_DISK_BYTES:
        yield warning("model cache", found, "there is little room for a model: set BATON_CACHE")
    else:
        yield ok("model cache", found)
