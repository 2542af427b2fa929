"""Which of a worker's hosts this one is, and what is wrong with that, before anything is read.

The settings `nodes`, `node` and `leader` come first. Without them LeaderWorkerSet's variables
count, and where `nodes` is given, torchrun's for the other two.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.addresses import bracketed, host_of, is_loopback, port_of
from serving.settings import SettingsError
from worker.hosts.interfaces import Address, addresses
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

FORM_S: Final = 120.0
"""Hosts get this long to join, seconds: containers start one after the other. Not tuned."""
AGAIN_S: Final = 1.0
"""Time between two look-ups of the leader's name, seconds. Not tuned."""
LEADER_PORT: Final = 50070
"""Where the leader listens if nothing else is said: near the usual ports of routers, and none of
them."""
LWS: Final = {
    "nodes": "LWS_GROUP_SIZE",
    "node": "LWS_WORKER_INDEX",
    "leader": "LWS_LEADER_ADDRESS",
}
TORCHRUN: Final = {"node": ("NODE_RANK", "GROUP_RANK"), "leader": ("MASTER_ADDR",)}
"""Its port is left out: torchrun listens there itself."""


class _UnknownYetError(Exception):
    """The leader's name does not lead to it, or not yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """This host's, where there are several."""

    nodes: int
    node: int
    """0 is the leader."""
    leader: str
    """HOST:PORT."""
    address: str
    """Address of this host, where the leader listens; elsewhere empty."""
    fabric: str
    """This host's in the network that `fabric` names."""
    interface: str
    """Which has that address."""

    @property
    def listen(self) -> str:
        """HOST:PORT at which the leader listens for agents."""
        return f"{bracketed(self.address)}:{self.leader.rpartition(':')[2]}"


def placed(
    settings: WorkerSettings, environment: Mapping[str, str]
) -> tuple[WorkerSettings, Place | None]:
    """The settings as the environment completes them, and this host's place. See `place_of`.

    Raises:
        SettingsError: a worker cannot be on such hosts. It says where their number comes from, if
            that is no setting.
    """
    completed = with_place(settings, environment)
    try:
        return completed, place_of(completed)
    except SettingsError as error:
        if settings.nodes or completed.nodes == 1:
            raise
        raise SettingsError(
            f"{error} ({LWS['nodes']} says {completed.nodes} hosts: nodes 1 is for a worker of this"
            " host alone)"
        ) from None


def with_place(settings: WorkerSettings, environment: Mapping[str, str]) -> WorkerSettings:
    """The settings with `nodes`, `node` and `leader` as the environment completes them.

    Raises:
        SettingsError: a variable holds no number.
    """
    nodes, node, leader = settings.nodes, settings.node, settings.leader
    nodes = nodes or _number(environment, LWS["nodes"]) or 1
    if nodes == 1:
        return settings.model_copy(update={"nodes": 1, "node": max(0, node)})
    names = {name: (LWS[name], *others) for name, others in TORCHRUN.items()}
    for name in names["node"]:
        if node < 0 and name in environment:
            node = _number(environment, name)
    leader = leader or next(
        (environment[name] for name in names["leader"] if name in environment), ""
    )
    if leader and port_of(leader) is None:
        leader = f"{bracketed(leader)}:{LEADER_PORT}"
    return settings.model_copy(update={"nodes": nodes, "node": node, "leader": leader})


def place_of(settings: WorkerSettings) -> Place | None:
    """This host's place; None: the worker has one host. Where the leader has a name, it waits at
    most FORM_S until that is known here, and for node 0 until it is this host's.

    Args:
        settings: with all that the environment says.

    Raises:
        SettingsError: a worker cannot be on such hosts.
    """
    nodes, node = settings.nodes, settings.node
    if nodes <= 1:
        if node > 0 or settings.leader or settings.fabric:
            raise SettingsError("worker: `node`, `leader` and `fabric` need `nodes` above 1")
        return None
    if obstacle := _obstacle(settings):
        raise SettingsError(f"worker: {obstacle}")
    network, own = _network(settings.fabric), addresses()
    fabric = next((one for one in own if one in network), None)
    if fabric is None:
        raise SettingsError(f"worker: this host has no address in fabric {network}")
    resolved = _found(settings)
    address = str(resolved) if node == 0 else ""
    return Place(nodes, node, settings.leader, address, str(fabric), own[fabric])


def _obstacle(settings: WorkerSettings) -> str:
    """Why a worker cannot be on so many hosts, by its settings alone; empty: it can."""
    nodes, node, ranks = settings.nodes, settings.node, settings.ranks
    if ranks % nodes or ranks < nodes:
        return (
            f"nodes {nodes} must divide the {ranks} ranks of pp {settings.pp} and tp {settings.tp}"
        )
    if node < 0:
        return f"node must say which of {nodes} hosts this is, from 0 on"
    if node >= nodes:
        return f"node {node} must be below nodes {nodes}: hosts count from 0"
    if port_of(settings.leader) is None:
        return f"leader must be the HOST:PORT or [V6]:PORT of node 0, the same on all {nodes} hosts"
    if not all(settings.tls[:3]):
        return f"nodes {nodes} need tls_dir: agents of other hosts join by certificates alone"
    if not settings.fabric:
        return (
            f"nodes {nodes} need fabric: activations and KV pages are not encrypted,"
            " so name their network, as trusted:CIDR or encrypted:CIDR"
        )
    if settings.kv_store:
        return "kv_store needs nodes 1: its process maps the memory of all ranks"
    if settings.debug.transport == "nccl":
        return "transport nccl cannot serve several ranks; use nixl"
    return ""


def _found(settings: WorkerSettings) -> Address:
    """The leader's address. Its name may come, or change, only when its container runs."""
    ends_s, told = time.monotonic() + FORM_S, False
    while True:
        try:
            return _resolved(settings)
        except _UnknownYetError as error:
            if time.monotonic() >= ends_s:
                raise SettingsError(str(error)) from None
            if not told:
                logger.warning("%s; it is looked up for %.0f s", error, FORM_S)
                told = True
        time.sleep(AGAIN_S)


def _resolved(settings: WorkerSettings) -> Address:
    """Raises SettingsError, and _UnknownYetError where another look may help."""
    host = host_of(settings.leader)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise _UnknownYetError(
            f"worker: leader {host} is not known here: {error.strerror}"
        ) from None
    if is_loopback(str(found)):
        raise SettingsError(
            f"worker: leader {host} is loopback here, which other hosts do not reach"
        )
    address = ipaddress.ip_address(str(found))
    if settings.node == 0 and address not in addresses():
        kind = SettingsError if str(found) == host else _UnknownYetError
        raise kind(
            f"worker: node 0 is the leader, and leader {settings.leader} is no address of this host"
        )
    return address


def _network(fabric: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        network = ipaddress.ip_network(fabric.partition(":")[2])
    except ValueError as error:
        raise SettingsError(f"worker: fabric {fabric}: {error}") from None
    if not network.prefixlen:
        raise SettingsError(f"worker: fabric {fabric} must be one network, and not all addresses")
    return network


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if value and not value.isdecimal():
        raise SettingsError(f"worker: {name} must be a number (got {value!r})")
    return int(value or 0)
