"""The addresses that this process listens on, its open descriptors and its memory, from Linux's /proc."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import os
import sys
from pathlib import Path

_LISTEN = "0A"


def can_list_sockets() -> bool:
    """Return whether this system has Linux's /proc."""
    return Path("/proc/net/tcp").exists()


def listening() -> set[tuple[str, int]]:
    """Return the address and port of every TCP socket that this process listens on."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def num_descriptors() -> int:
    """Return how many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, including memory that it shares.

    Unreachable reference cycles, and freed memory that glibc retains, are released first.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    if address == "localhost":
        return True
    try:
        return _parsed(address).is_loopback
    except ValueError:
        return False


def is_wildcard(address: str) -> bool:
    """Return whether an address stands for all addresses of the machine."""
    return _parsed(address).is_unspecified


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _address(digits: str) -> str:
    """Convert an address from the notation of /proc, which is words of four bytes in the machine's byte order."""
    words = bytes.fromhex(digits)
    if sys.byteorder == "little":
        words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return str(ipaddress.ip_address(words))
