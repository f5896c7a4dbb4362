"""The engine contract over CUDA arenas: a sink swapped for one handle, and another for the growth."""

from __future__ import annotations

import importlib

import pytest
from kvarena.transfer import EngineUnavailable, MooncakeEngine, NixlEngine
from kvarena.transfer.mooncake.install import installed_variants, load_transfer_engine
from kvarena.transfer.nixl.install import load_nixl
from kvarena.transfer.testing import Standalone, TransferEngineContract

pytestmark = pytest.mark.gpu


class OnCuda(TransferEngineContract):
    __test__ = False
    memory_factory = importlib.import_module("arena_hosts").CudaArenaMemory
    reserved_bytes = 64 << 20
    backed_bytes = 32 << 20
    timeout = 60.0
    reuses_engines = True
    leak_allowance = (4, 64, 4)  # the driver's own


class TestMooncakeOnCuda(OnCuda):
    __test__ = True
    engine_factory = Standalone(MooncakeEngine, timeout=10)

    @pytest.fixture(autouse=True)
    def _available(self) -> None:
        if any("non-cuda" in name for name, _ in installed_variants()):
            pytest.skip("mooncake-transfer-engine-non-cuda cannot read CUDA memory")
        try:
            load_transfer_engine()
        except EngineUnavailable as error:
            pytest.skip(str(error))


class TestNixlOnCuda(OnCuda):
    __test__ = True
    engine_factory = Standalone(NixlEngine, memory="VRAM", vmm=True, timeout=60)
    leak_allowance = (12, 64, 4)  # UCX keeps a socket of each peer that was disconnected

    @pytest.fixture(autouse=True)
    def _available(self) -> None:
        try:
            load_nixl()
        except EngineUnavailable as error:
            pytest.skip(str(error))
