"""Address space whose memory comes and goes by range: what a pool that grows and shrinks in place stands on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from math import prod

import torch
from torch import Tensor

from octavo.errors import ConfigError

# Python 3.11 names neither.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_POPULATE_WRITE = 23

# Through ctypes, so that a call of milliseconds does not hold the interpreter's lock.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pages:
    """A private anonymous mapping. It lives as long as any tensor over it. Raises ConfigError where the system refuses the size."""

    def __init__(self, num_bytes: int) -> None:
        # Private: what was given back of a shared mapping keeps its data, and its memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._mapping = mmap.mmap(-1, num_bytes, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(f"the system refuses {num_bytes} bytes of address space for KV memory ({error})") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first bytes as a tensor."""
        # torch holds on to the object alone; a memoryview also keeps the mapping from being closed.
        return torch.frombuffer(memoryview(self._mapping), dtype=dtype, count=prod(shape)).view(shape)

    def commit(self, start: int, end: int) -> None:
        """Give memory to bytes [start, end), which hold nothing yet. Raises OSError where there is none."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if _madvise(self._address + first, end - first, _POPULATE_WRITE):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            ctypes.memset(self._address + start, 0, end - start)  # a kernel before 5.14

    def release(self, start: int, end: int) -> None:
        """Give the memory of bytes [start, end) back; they read zero when they are used again."""
        first = min(-(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end)
        ctypes.memset(self._address + start, 0, first - start)
        if first < end:
            _madvise(self._address + first, end - first, mmap.MADV_DONTNEED)
