"""The CUDA driver, loaded when it is first wanted, with its codes made into errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvarena.pool.errors import DriverError, DriverUnavailableError

__all__ = ["call", "current_context", "has_attribute", "load", "primary_context"]

_lock = threading.Lock()
_contexts: dict[int, Any] = {}


@functools.cache
def load() -> Any:
    """``cuda.bindings.driver``, initialized.

    Raises
    ------
    DriverUnavailableError
        The bindings or the driver's library are missing, or there is no device.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverUnavailableError(
            "import cuda.bindings", "ImportError", str(error), fix="Install cuda-python 13 or later."
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:  # cuda.pathfinder has no libcuda to load
        raise DriverUnavailableError(
            "cuInit",
            type(error).__name__,
            "libcuda.so.1 was not found",
            fix="Install the NVIDIA driver, or use the host driver.",
        ) from error
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DriverUnavailableError(
            "cuInit", result.name, fix="See that nvidia-smi shows a device, or use the host driver."
        )
    return driver


def call(name: str, *args: Any, detail: str = "") -> Any:
    """Call a driver function and return its value, or tuple of values.

    Raises
    ------
    DriverError
        It answered with another code than success.
    """
    result, *values = getattr(load(), name)(*args)
    if result.value != 0:
        raise DriverError(name, result.name, detail)
    return values[0] if len(values) == 1 else tuple(values)


def has_attribute(device: int, name: str) -> bool:
    """Whether a device says yes to ``CU_DEVICE_ATTRIBUTE_<name>``; no, if the driver does not know it."""
    attribute = getattr(load().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    try:
        return bool(call("cuDeviceGetAttribute", attribute, device))
    except DriverError:
        return False


def primary_context(device: int) -> Any:
    """The context that torch uses too; retained once, and kept for the life of the process as torch does."""
    with _lock:
        if device not in _contexts:
            _contexts[device] = call("cuDevicePrimaryCtxRetain", device)
        return _contexts[device]


@contextmanager
def current_context(context: Any) -> Iterator[None]:
    """Make a context this thread's for a while."""
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")
