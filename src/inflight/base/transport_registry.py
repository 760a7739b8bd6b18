"""Lookup of installed transports by name.

Every transport, including those of inflight, is an entry point in the group ``inflight.transports``. This module does
not refer to any of them.
"""

from __future__ import annotations

from inflight.base.extensions import find_entry_points, load_installed
from inflight.contracts import Transport
from inflight.errors import ConfigError, UnsupportedError
from inflight.wire import Capabilities, Needs, TransportSpec

GROUP = "transports"


def installed_transports() -> list[Transport]:
    """Return the installed transports, sorted by name. Raises the same error as `find_transport`."""
    return [find_transport(name) for name in sorted(find_entry_points(GROUP))]


def receivable_transports(*, on_gpu: bool) -> tuple[str, ...]:
    """Return the names of the transports that a server supports, given whether its weights are on a GPU.

    Raises the same error as `find_transport`.
    """
    return tuple(transport.name for transport in installed_transports() if on_gpu or not transport.needs_gpu)


def refusal(capabilities: Capabilities, name: str) -> str | None:
    """Return why an endpoint does not support a transport, as text that follows "does not support"; None if it does."""
    lack = capabilities.missing(Needs(transport=name)).get("transport")
    if lack is None or name not in (found := find_entry_points(GROUP)) or not find_transport(name).needs_gpu:
        return lack
    if any(other in found and find_transport(other).needs_gpu for other in capabilities.transports):
        return lack
    return f"{lack}. {name} delivers weights to a GPU, but this server's weights are on the CPU or arrive there"


def find_transport(name: str) -> Transport:
    """Return an installed transport.

    Raises `ConfigError` if the name is unknown (the error lists the known names) or if the transport cannot be loaded.
    """
    transport = load_installed("transport", GROUP, name)
    if not isinstance(transport, Transport) or transport.name != name:
        raise ConfigError(f"the entry point {name!r} of inflight.transports is not a Transport of that name")
    return transport


def spec_type(name: str) -> type[TransportSpec]:
    """Return the type with which specs of the named transport are parsed when they arrive from another process.

    The name selects an installed transport; nothing else is imported. For an unknown name, raises `UnsupportedError`,
    which lists the known names.
    """
    found = find_entry_points(GROUP)
    if name not in found:
        raise UnsupportedError(f"the {name} transport is not installed here; installed: {', '.join(sorted(found))}")
    return find_transport(name).spec_type
