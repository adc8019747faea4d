"""What the process itself occupies."""

import mmap
from pathlib import Path

from lkv._host import resident_bytes


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def resident_of(storage) -> int:
    """Resident bytes of a storage's own memory."""
    return resident_bytes([(storage.address, storage.address + storage.nbytes)])
