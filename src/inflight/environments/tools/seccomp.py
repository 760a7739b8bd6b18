"""The seccomp filter of a sandbox, which specifies the system calls that the kernel refuses.

Namespaces and a private root hide files, processes and networks. The filter blocks what these do not: additional
processes (so that the memory limit of one process is the limit of all), other programs, new namespaces, memory that no
limit counts (System V segments, memfd), sockets of families that a network namespace does not confine (vsock reaches
the hypervisor), kernel keyrings, and calls that have often had exploitable bugs.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

from inflight.errors import UnsupportedError

_DENIED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
}
"""System calls refused with EPERM, with their numbers on x86-64 and on aarch64 (Linux's unistd.h)."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of each machine in the tables, and its AUDIT_ARCH."""

_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6. All three are confined by the network and mount namespaces."""

_CLONE_THREAD = 0x10000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


@functools.cache
def seccomp_filter() -> bytes:
    """Return the filter as an array of ``struct sock_filter`` for this machine.

    Raises `UnsupportedError` on a machine whose system calls are not in the tables.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise UnsupportedError(
            f"the sandbox supports only {' and '.join(_MACHINES)}, not {machine!r}; isolation='limits' runs code "
            "without protection"
        )
    column, arch = _MACHINES[machine]
    denied = [numbers[column] for numbers in _DENIED.values()]
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),  # a call in the convention of another machine, such as int 0x80
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    for number in denied:
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    # glibc tries clone3, whose flags lie in memory that a filter cannot read, and falls back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),  # threads only: the kernel combines them with no new user or process namespace
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        program += [
            (_EQUAL, 0, len(_FAMILIES) + 3, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            *((_EQUAL, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)),
            (_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
