from __future__ import annotations

import pickle
import subprocess
import sys

import kvarena.pool
import pytest
import torch
from kvarena.errors import KvArenaError
from kvarena.pool import _cuda_api, errors

SAMPLES = [
    errors.DriverError("mmap", "ENOMEM", "5 bytes", fix="Use less."),
    errors.DriverUnavailableError("cuInit", "CUDA_ERROR_NO_DEVICE"),
    errors.OutOfMemoryError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", requested=10, free=4),
    errors.PoolSizeError("Too much.", requested=9, minimum=1, maximum=8, fix="Use 8."),
    errors.PoolStateError("Closed.", fix="Open it."),
    errors.DescriptorLimitError("dup"),
    errors.MappingLeftError("cuMemUnmap", "CUDA_ERROR_UNKNOWN", "5 bytes"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_errors_travel_between_processes(error: KvArenaError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.LayoutError, (ValueError,)),
        (errors.PoolSizeError, (ValueError, RuntimeError)),
        (errors.PoolStateError, (RuntimeError,)),
        (errors.AllocatorError, (RuntimeError,)),
        (errors.ArenaStateError, (RuntimeError,)),
        (errors.DriverError, (RuntimeError,)),
        (errors.OutOfMemoryError, (RuntimeError,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_are_what_sglang_raises_there(
    kind: type[KvArenaError], bases: tuple[type[Exception], ...]
) -> None:
    """SGLang 0.5.23: unified_memory_pool.py, unified_hybrid_swa.py and kv_vmm_backing.py."""
    assert all(issubclass(kind, base) for base in (KvArenaError, *bases))
    assert not issubclass(kind, ValueError) or ValueError in bases


def test_functions_of_sglangs_names_raise_sglangs_errors() -> None:
    from kvarena.pool.testing.allocator_samples import HybridSample

    with HybridSample(kvarena.pool.HostVmm(), reserved=True) as sample:
        pool, allocator = sample.pool, sample.allocator
        none = kvarena.pool.PostCaptureKVResize(max_total_num_tokens=1)
        small = kvarena.pool.PostCaptureKVResize(max_total_num_tokens=1, unified_memory_pool_bytes=1)
        with pytest.raises(ValueError, match="unified_memory_pool_bytes"):
            pool.finalize_backing(none)
        with pytest.raises(RuntimeError, match="one request"):
            pool.finalize_backing(small)
        with pytest.raises(ValueError, match="unified_memory_pool_bytes"):
            allocator.resize(none)
        with pytest.raises(RuntimeError, match="finalize_backing"):
            allocator.resize(small)
        sample.finalize(sample.reserved_bytes)
        with pytest.raises(RuntimeError, match="final already"):
            pool.finalize_backing(small)
        assert allocator.alloc(sample.page_size) is not None
        with pytest.raises(RuntimeError, match="allocated"):
            allocator.resize(kvarena.pool.resize_for(pool, pool.total_bytes))


def test_errors_say_what_and_what_to_do() -> None:
    driver, _, memory, size, *_ = SAMPLES
    assert str(driver) == "mmap failed with ENOMEM: 5 bytes. Use less."
    assert "10 bytes were asked for and 4 are free (6 too few)" in str(memory)
    assert memory.fix
    assert str(size) == "Too much. Use 8."


def test_errors_cost_no_torch() -> None:
    code = """
import sys
import kvarena.pool.errors, kvarena.pool.driver, kvarena.pool.testing, kvarena.pool.arena
import kvarena.pool.host_vmm, kvarena.pool.cuda_vmm
heavy = [name for name in ("torch", "numpy", "cuda") if name in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    for name in kvarena.pool.__all__:
        assert getattr(kvarena.pool, name).__name__ == name
    assert set(kvarena.pool.__all__) <= set(dir(kvarena.pool))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = kvarena.pool.Nothing


class TestWithoutCuda:
    """A machine without a GPU gets our own error, never the bindings'."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        _cuda_api.load.cache_clear()

    def test_no_driver(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has one")
        with pytest.raises(errors.DriverUnavailableError, match=r"Install the NVIDIA driver|nvidia-smi"):
            kvarena.pool.CudaVmm()

    def test_no_bindings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(errors.DriverUnavailableError, match="Install cuda-python"):
            kvarena.pool.CudaVmm()

    def test_a_torch_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_cuda_api, "load", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(errors.DriverUnavailableError, match="sees no CUDA device"):
            kvarena.pool.CudaVmm()
