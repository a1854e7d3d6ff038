# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What this process learns of its host: cores, identity, addresses, open sockets."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from torch_cpudist.errors import AddressError, ConfigurationError

_SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"
_ROOT = Path("/")


def _cgroup_quota(folder: Path) -> float | None:
    """Cores that a cgroup folder allows (version 2 or 1); ``None`` without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def cores(root: Path = _ROOT) -> int:
    """Cores this process may use: its affinity, cut by every cgroup quota above it.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    usable = float(len(os.sched_getaffinity(0)))
    folders = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/cpu"]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "cpu", "cpu,cpuacct"):
                top = folders[1] if controllers else folders[0]
                own = top / path.lstrip("/")
                folders += [own, *(p for p in own.parents if top in p.parents)]
    for folder in folders:
        quota = _cgroup_quota(folder)
        if quota is not None:
            usable = min(usable, quota)
    return max(1, int(usable))


def identity() -> str:
    """A text that is equal exactly for processes that reach each other's loopback.

    The boot id tells machines apart (host names may repeat); the network namespace
    tells containers of one machine apart, which share neither loopback nor abstract
    unix sockets.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def description() -> str:
    """Host name and process id, for messages."""
    return f"{socket.gethostname()} pid {os.getpid()}"


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface; ``None`` if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address; ``None`` if there is none."""
    for _, name in socket.if_nameindex():
        if interface_address(name) == address:
            return name
    return None


def is_loopback(host: str, port: int) -> bool:
    """Whether a name or address means this host only.

    Raises:
        AddressError: it does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{host}: the name does not resolve ({error}).") from error
    return all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback
        for entry in found
    )


def address_towards(host: str, port: int) -> str:
    """This host's own address on the way to ``host``. Sends nothing.

    Raises:
        ConfigurationError: ``host`` does not resolve, or only to a loopback address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigurationError(
            f"MASTER_ADDR={host} does not resolve ({error}). Give torchrun an "
            "--rdzv-endpoint or --master-addr that every host resolves, or set "
            "CPUDIST_BIND to an address of this host."
        ) from error
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            own = str(probe.getsockname()[0])
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return own
    raise ConfigurationError(
        f"ranks run on several hosts, but MASTER_ADDR={host} leads to loopback or "
        "nowhere from this one. Set CPUDIST_BIND to an address or interface of this "
        "host that the others reach, or give torchrun --local-addr."
    )


def bind_address(spec: str) -> str:
    """The numeric address that ``CPUDIST_BIND`` names: an address or an interface.

    Raises:
        ConfigurationError: it is neither, or a wildcard.
    """
    try:
        numeric = ipaddress.ip_address(spec)
    except ValueError:
        pass
    else:
        if numeric.is_unspecified:
            raise ConfigurationError(
                f"CPUDIST_BIND={spec}: others cannot connect to a wildcard. Set the "
                "address or interface that they reach."
            )
        return str(numeric)
    names = [name for _, name in socket.if_nameindex()]
    if spec not in names:
        raise ConfigurationError(
            f"CPUDIST_BIND={spec} is neither a numeric address nor an interface of "
            f"this host. Interfaces: {', '.join(names)}."
        )
    address = interface_address(spec)
    if address is None:
        raise ConfigurationError(
            f"CPUDIST_BIND={spec}: this interface has no IPv4 address. Set an address "
            "instead."
        )
    return address


def _endpoint_names(raw: socket.socket) -> set[str]:
    """The names of both ends of a socket, in the form of this package's addresses."""
    names = set()
    for ask in (raw.getsockname, raw.getpeername):
        try:
            name = ask()
        except OSError:
            continue
        if raw.family == socket.AF_UNIX:
            text = name.decode(errors="replace") if isinstance(name, bytes) else name
            names.add("unix:" + text.replace("\0", "@", 1))
        elif raw.family in (socket.AF_INET, socket.AF_INET6):
            host = f"[{name[0]}]" if ":" in name[0] else name[0]
            names.add(f"tcp:{host}:{name[1]}")
    return names


def close_inherited_sockets(addresses: set[str]) -> int:
    """Closes the sockets of a forked child that lead to or from one of ``addresses``.

    A child that kept them would keep the parent's connections open after the parent
    died, so that its peers learn of the death late.

    Args:
        addresses: ``"unix:@name#boot-id"`` or ``"tcp:host:port"``.

    Returns:
        How many were closed.
    """
    ours = {address.partition("#")[0] for address in addresses}
    closed = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as raw:
                found = bool(_endpoint_names(raw) & ours)
            if found:
                os.close(int(entry))
                closed += 1
        except OSError:
            continue
    return closed
