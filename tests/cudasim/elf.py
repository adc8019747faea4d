"""The functions inside a shared object, and how to send a call of one elsewhere. Linux; x86-64 and aarch64."""

import ctypes
import mmap
import os
import platform
import struct

SYMTAB, FUNCTION = 2, 2
READ_WRITE_EXECUTE, READ_EXECUTE = 7, 5


class LayoutError(RuntimeError):
    """The file or the machine is not what the simulator was written for."""


def functions(path):
    """Return ``{name: (value, size)}`` of every function that an ELF64 file defines, from its symbol table."""
    with open(path, "rb") as file:
        data = file.read()
    if data[:5] != b"\x7fELF\x02":
        raise LayoutError(f"{path}: not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
    found = {}
    for _, kind, _, _, offset, size, link, _, _, step in sections:
        if kind != SYMTAB:
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, step):
            name, info, _, section, value, length = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == FUNCTION and section:
                end = data.index(b"\0", names + name)
                found[data[names + name : end].decode()] = (value, length)
    return found


def _jump(target):
    machine = platform.machine()
    if machine == "x86_64":
        return b"\xff\x25\x00\x00\x00\x00" + struct.pack("<Q", target)  # jmp *(%rip); the address
    if machine == "aarch64":
        return struct.pack("<IIQ", 0x58000050, 0xD61F0200, target)  # ldr x16, #8; br x16; the address
    raise LayoutError(f"no jump is known for {machine}")


def redirect(targets):
    """Let each function at an address jump to another, in this process's memory only.

    `targets` maps ``(address, size in bytes)`` to the address of the replacement.
    """
    patches = []
    for (address, size), target in targets.items():
        code = _jump(target)
        if size < len(code):
            raise LayoutError(f"a function of {size} bytes at {address:#x} has no room for a jump")
        patches.append((address, code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE
    first = min(address for address, _ in patches) // page * page
    last = -(-max(address + len(code) for address, code in patches) // page) * page
    if libc.mprotect(first, last - first, READ_WRITE_EXECUTE):
        raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")
    for address, code in patches:
        ctypes.memmove(address, code, len(code))
    libc.mprotect(first, last - first, READ_EXECUTE)
    if platform.machine() == "aarch64":
        ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(first), ctypes.c_void_p(last))
