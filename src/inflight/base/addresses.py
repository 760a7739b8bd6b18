"""Checks what a host name or an address refers to."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    """Return whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
