"""Whom network policies let in, of the selectors that the chart writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """Whoever connects: labels in the release's namespace, or somebody elsewhere."""

    labels: Mapping[str, str] = field(default_factory=dict)
    is_near: bool = True


def admits(policies: list[dict[str, Any]], pod: Mapping[str, str], peer: Peer, port: int) -> bool:
    """Whether policies let a peer reach a port of the pod with these labels."""
    own = [one["spec"] for one in policies if _selects(one["spec"]["podSelector"], pod)]
    return not own or any(
        _has_port(rule, port) and any(_is_from(one, peer) for one in rule.get("from", [{}]))
        for spec in own
        for rule in spec["ingress"]
    )


def named_ports(policies: list[dict[str, Any]], pod: Mapping[str, str]) -> set[int]:
    """The ports that the pod's policies name."""
    return {
        port["port"]
        for one in policies
        if _selects(one["spec"]["podSelector"], pod)
        for rule in one["spec"]["ingress"]
        for port in rule.get("ports", ())
    }


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    return "ports" not in rule or any(one["port"] == port for one in rule["ports"])


def _is_from(source: Mapping[str, Any], peer: Peer) -> bool:
    assert set(source) <= {"podSelector", "namespaceSelector"}
    is_named = "namespaceSelector" not in source or source["namespaceSelector"] == {}
    is_here = peer.is_near if "namespaceSelector" not in source and source else True
    return is_named and is_here and _selects(source.get("podSelector", {}), peer.labels)
