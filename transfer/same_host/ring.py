"""A page of memory that sender and receiver share, in which finished copies are counted.

The sender numbers its leased copies to a receiver 1, 2, 3 and so on, and writes a record of each before
it starts. Whatever makes the copies (a kernel, or a thread on the host) stores the number of the last
finished one, so that the receiver learns of it without a packet, a thread or a system call in between.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from typing import NamedTuple, final

from kvarena.transfer.same_host.errors import WireError

__all__ = ["RECORDS", "Record", "Ring"]

RECORDS = 1024
"""Copies that may be unread by the receiver at one time."""

_RECORD_BYTES = 64
_HEADER_BYTES = 4096
_BYTES = _HEADER_BYTES + RECORDS * _RECORD_BYTES
_RECORD = struct.Struct("<16sQQQ")
_pack = _RECORD.pack_into
# Words of 8 bytes; what one side writes has a cache line of its own.
_ENDED, _READ = 0, 8
_FAILED, _NUMBER = 6, 7
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Record(NamedTuple):
    """What a copy is of."""

    digest: bytes
    """Of the lease; zeros: of none."""
    part: int
    """Index of the sub-pool among the lease's, by name."""
    pages: int
    epoch: int


@final
class Ring:
    """One mapping of it; the receiver makes it, and the sender opens the descriptor.

    A process that holds a descriptor cannot make the memory shorter (it is sealed), so that reading it
    never faults. The order of stores is that of the machine: written for x86-64, which keeps it.
    """

    def __init__(self, fd: int) -> None:
        """Map a descriptor, which stays the caller's; raises `WireError` if it is no such memory."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != _BYTES:
                raise WireError("the memory for completions has another size, or is not sealed")
            self._map = mmap.mmap(fd, _BYTES)
        except (OSError, ValueError) as error:
            raise WireError(f"the memory for completions cannot be mapped: {error}") from error
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        """Of the count of finished copies."""
        del anchor  # it would keep the memory mapped
        self.nbytes = _BYTES
        self.started = 0
        """The last copy that was started; the sender's own count."""
        self.read = 0
        """The last one whose record was read; the receiver's own count."""
        # Copies that failed and whose records were overwritten since: someone may ask for them yet.
        self._failed: set[int] = set()
        self._open = True

    @classmethod
    def make(cls) -> tuple[Ring, int]:
        """A new one, and its descriptor for the sender."""
        fd = os.memfd_create("kv-done", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd), fd
        except BaseException:
            os.close(fd)
            raise

    @property
    def ended(self) -> int:
        """The last copy that has ended, as the sender tells."""
        return self._words[_ENDED] if self._open else 0

    @property
    def has_news(self) -> bool:
        """Whether `next_ended` may have something; asked without a lock, and again and again."""
        number = self.read + 1
        try:
            return self._words[_ENDED] >= number or (
                self._words[self._word(number) + _NUMBER] == number and self.has_failed(number)
            )
        except ValueError:  # it was closed meanwhile
            return False

    @property
    def unread(self) -> int:
        """Copies that were started and not read by the receiver."""
        return self.started - self._words[_READ]

    def begin(self, digest: bytes, part: int, pages: int, epoch: int) -> int:
        """The sender starts a copy: its record; returns its number, or 0 if there is no room."""
        words = self._words
        number = self.started + 1
        if number - words[_READ] > RECORDS:
            return 0
        at = _HEADER_BYTES + number % RECORDS * _RECORD_BYTES
        _pack(self._map, at, digest, part, pages, epoch)
        at >>= 3
        if words[at + _FAILED]:
            self._failed.add(number - RECORDS)
            words[at + _NUMBER] = 0  # before the mark goes: see `has_failed`
            words[at + _FAILED] = 0
        words[at + _NUMBER] = number
        self.started = number
        return number

    def take_back(self, number: int) -> None:
        """The copy that was begun last was not started after all."""
        self._words[self._word(number) + _NUMBER] = 0
        self.started = number - 1

    def fail(self, number: int) -> None:
        """That copy will never be good, whatever the count says."""
        if self._open:
            self._words[self._word(number) + _FAILED] = 1

    def has_failed(self, number: int) -> bool:
        """Whether `fail` was called for it, on either side; the sender may ask at any time later."""
        if not self._open:
            return False
        at = self._word(number)
        failed = self._words[at + _FAILED] != 0
        # Looked at after the mark, which is of this copy then.
        return failed if self._words[at + _NUMBER] == number else number in self._failed

    def next_ended(self) -> tuple[Record, bool] | None:
        """The receiver reads: the record of the next copy that ended, and whether it went well; or None.

        Raises
        ------
        WireError
            The sender counts copies that it never began.
        """
        number = self.read + 1
        if not self._open:
            return None
        begun = self._is_begun(number)
        if self._words[_ENDED] < number and not (begun and self.has_failed(number)):
            return None
        if not begun:
            raise WireError(f"copy {number} has ended but was never begun")
        record, good = self._record(number), not self.has_failed(number)
        self.read = number
        self._words[_READ] = number
        return record, good

    def begun(self) -> list[Record]:
        """What the sender has begun and not ended; asked when it is gone."""
        records: list[Record] = []
        number = self.read + 1
        while self._open and len(records) < RECORDS and self._is_begun(number):
            records.append(self._record(number))
            number += 1
        return records

    def close(self) -> None:
        """Unmap it; a second call does nothing."""
        if self._open:
            self._open = False
            self._words.release()
            self._bytes.release()
            self._map.close()

    def _is_begun(self, number: int) -> bool:
        return self._words[self._word(number) + _NUMBER] == number

    def _record(self, number: int) -> Record:
        return Record(*_RECORD.unpack_from(self._map, _HEADER_BYTES + number % RECORDS * _RECORD_BYTES))

    @staticmethod
    def _word(number: int) -> int:
        return (_HEADER_BYTES + number % RECORDS * _RECORD_BYTES) >> 3
