"""A third party's plugin: on the device that FAILING_DEVICE names, the handle after the sink's is refused.

With FAILING_FOREVER=1 so are all that follow.
"""

from __future__ import annotations

import os

import torch
from kvarena.hooks import hookimpl
from kvarena.pool import CudaVmm, Driver, OutOfMemoryError
from kvarena.pool.testing import FailingDriver


@hookimpl
def kvarena_driver(device: torch.device) -> Driver | None:
    if device.type != "cuda" or str(device.index) != os.environ.get("FAILING_DEVICE"):
        return None
    return FailingDriver(
        CudaVmm(device),
        fail_at=2,
        ops={"create"},
        error=OutOfMemoryError("cuMemCreate", "INJECTED", requested=2, free=1),
        forever=os.environ.get("FAILING_FOREVER") == "1",
    )
