"""Errors of the system that say what this process may have no more of."""

from __future__ import annotations

import errno
import resource

from kvarena.errors import DescriptorLimitError

__all__ = ["describe_shortage"]


def describe_shortage(error: BaseException) -> str:
    """What ran out and what to set, if an error says that something did; empty otherwise.

    Parameters
    ----------
    error : BaseException
        Of the system or of Python; anything with an ``errno`` (``OSError``, ``zmq.ZMQError``), a
        ``MemoryError``, or the ``RuntimeError`` of a thread that could not be started.
    """
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return str(DescriptorLimitError("a call of the system", errno.errorcode[number]))
    if number == errno.ENOSPC:
        return f"a file system is full: {error}. Free some space, or set KVARENA_SOCKET_DIR to another one."
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        bound = "" if limit == resource.RLIM_INFINITY else f" (RLIMIT_AS is {limit} bytes: ulimit -v)"
        return f"no memory or address space is left{bound}. Lower KVARENA_MEMORY_LIMIT, or raise the limit."
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if no_thread or (isinstance(error, OSError) and number == errno.EAGAIN):
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        return f"no further thread or process may be started (RLIMIT_NPROC is {limit}). Raise it (ulimit -u)."
    return ""
