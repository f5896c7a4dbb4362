"""The root of every error that kvarena raises.

This package imports nothing of ours, so that :mod:`kvarena.pool` and
:mod:`kvarena.transfer`, which know nothing of each other, can share it.
"""

from __future__ import annotations

import errno
import resource
from typing import Any

__all__ = ["DescriptorLimitError", "KvArenaError"]


class KvArenaError(Exception):
    """Something that kvarena refuses or that failed beneath it.

    Parameters
    ----------
    what : str
        What happened, with the numbers.
    fix : str, optional
        What to set or do about it.
    """

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(f"{what} {fix}".strip())
        self.what = what
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        # Children have other parameters, and errors travel between processes.
        return _rebuild, (type(self), self.args, self.__dict__)


class DescriptorLimitError(KvArenaError):
    """No file descriptor is left, so no handle can be made, exported or imported; nothing was taken.

    Parameters
    ----------
    op : str
        The call that needed one (``memfd_create``, ``dup``, ``recvmsg``).
    code : str
        ``EMFILE``: the limit of this process, RLIMIT_NOFILE, is reached.
        ``ENFILE``: the machine's, ``fs.file-max``.

    Attributes
    ----------
    op, code : str
        As given.
    limit : int
        The soft RLIMIT_NOFILE of this process when the call failed.
    """

    def __init__(self, op: str, code: str = "EMFILE") -> None:
        self.limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.op = op
        self.code = code
        if code == "ENFILE":
            super().__init__(
                f"{op} failed with ENFILE: the machine has no file descriptor left "
                f"(RLIMIT_NOFILE of this process is {self.limit}).",
                fix="Raise the sysctl fs.file-max, or end processes that hold many files.",
            )
        else:
            super().__init__(
                f"{op} failed with {code}: this process may open {self.limit} file descriptors "
                f"(RLIMIT_NOFILE; its hard limit is {hard}) and has none left.",
                fix="Raise it before the start (`ulimit -n`, LimitNOFILE= of a systemd unit, --ulimit "
                "nofile= of a container), or grow in fewer and larger steps: each handle of a pool in host "
                "memory holds a descriptor.",
            )

    @classmethod
    def raise_for(cls, error: OSError, op: str) -> None:
        """Raise this error if `error` says that descriptors ran out; return for any other.

        Raises
        ------
        DescriptorLimitError
            The number of `error` is EMFILE or ENFILE.
        """
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise cls(op, errno.errorcode[error.errno]) from error


def _rebuild(kind: type[KvArenaError], args: tuple[Any, ...], state: dict[str, Any]) -> KvArenaError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
