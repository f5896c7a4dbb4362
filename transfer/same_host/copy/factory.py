"""Which copier moves a driver's memory."""

from __future__ import annotations

from kvarena.transfer.errors import EngineUnavailable
from kvarena.transfer.same_host.copy.clock import Copier
from kvarena.transfer.same_host.memory import MemoryDriver

__all__ = ["make_copier"]


def make_copier(driver: MemoryDriver, thread_name: str) -> Copier:
    """The copier for a driver's memory. Raises `EngineUnavailable`."""
    if driver.name != "cuda":
        from kvarena.transfer.same_host.copy.host import HostCopier

        return HostCopier(thread_name)
    try:
        from kvarena.transfer.same_host.copy.cuda import CudaCopier
    except ImportError as error:
        raise EngineUnavailable(
            "same-host", f"{error.name} cannot be imported ({error})", fix="Install triton and cuda-python."
        ) from error
    return CudaCopier(driver.device.index)
