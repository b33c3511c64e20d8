"""Runs one piece of machine code and prints what it returned. Needs nothing but the standard library.

    python -I -S execute.py HEX [amx]

It runs in a separate process, because an unsupported instruction ends the process that executes it. Exit code 3: the
code was not executed, and the last line of stderr says why.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

NOT_TRIED = 3
PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
MAP_PRIVATE = 2
MAP_ANONYMOUS = 0x1000 if sys.platform == "darwin" else 0x20
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
PR_SET_DUMPABLE = 4


class NotTried(Exception):
    pass


def disable_core_dumps() -> None:
    """Write no core file and no crash log: a crash is an expected result here."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def request_amx() -> None:
    """Linux enables the large tile registers only for processes that request them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0:
        code = ctypes.get_errno()
        raise PermissionError(code, os.strerror(code))


def execute(code: bytes) -> int:
    """The return value of `code`, a function without arguments."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = 1 << 16  # a multiple of every page size
    page = libc.mmap(None, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if page in (None, ctypes.c_void_p(-1).value):
        raise NotTried(f"cannot allocate memory for machine code ({errno.errorcode.get(ctypes.get_errno(), '?')})")
    ctypes.memmove(page, code, len(code))
    # Never writable and executable at once, which hardened systems forbid.
    if libc.mprotect(page, size, PROT_READ | PROT_EXEC) != 0:
        raise NotTried(f"this system does not allow executable memory ({errno.errorcode.get(ctypes.get_errno(), '?')})")
    if sys.platform == "darwin":
        libc.sys_icache_invalidate(ctypes.c_void_p(page), ctypes.c_size_t(len(code)))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(page)())


def main() -> int:
    disable_core_dumps()
    try:
        if "amx" in sys.argv[2:]:
            request_amx()
        sys.stdout.write(f"{execute(bytes.fromhex(sys.argv[1]))}\n")
    except NotTried as reason:
        sys.stderr.write(f"{reason}\n")
        return NOT_TRIED
    except PermissionError as refusal:
        sys.stderr.write(f"the kernel does not allow this process to use the AMX tile registers ({refusal.strerror})\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
