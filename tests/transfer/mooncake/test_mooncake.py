"""What is particular to Mooncake: installation, return codes, limits, lanes that break."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from kvarena.transfer import (
    EngineUnavailable,
    MooncakeEngine,
    Region,
    RegistrationError,
    TransferFailed,
    TransferTimeout,
)
from kvarena.transfer.mooncake import engine as mooncake_module
from kvarena.transfer.mooncake import install, start
from kvarena.transfer.testing import EngineHost, HostMemory, RemoteHost, Standalone

MIB = 1 << 20


class TestInstallation:
    @pytest.fixture
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def install(*names: str) -> None:
            distributions = [
                types.SimpleNamespace(metadata={"Name": name}, version="0.3.13") for name in names
            ]
            monkeypatch.setattr(importlib.metadata, "distributions", lambda: distributions)

        return install

    @pytest.fixture
    def failing_import(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def fail(error: Exception) -> None:
            def load(name: str) -> Any:
                assert name == "mooncake.engine"
                raise error

            monkeypatch.setattr(importlib, "import_module", load)

        return fail

    def test_the_variant_that_is_here_is_found(self) -> None:
        (variant,) = install.installed_variants()
        assert variant[0] in install.VARIANTS
        assert variant[1] == importlib.metadata.version(variant[0])

    def test_none_is_reported_with_the_extras(self, installed: Any, failing_import: Any) -> None:
        installed("numpy")
        failing_import(ModuleNotFoundError("No module named 'mooncake'"))
        with pytest.raises(EngineUnavailable, match="not installed") as unavailable:
            MooncakeEngine()
        for extra in install.VARIANTS.values():
            assert f"kvarena[{extra}]" in unavailable.value.fix

    def test_two_are_reported_by_name(self, installed: Any) -> None:
        installed("mooncake_transfer_engine", "Mooncake-Transfer-Engine-CUDA13", "numpy")
        with pytest.raises(EngineUnavailable, match="installed together") as unavailable:
            install.load_transfer_engine()
        assert "mooncake-transfer-engine 0.3.13" in unavailable.value.why
        assert "mooncake-transfer-engine-cuda13 0.3.13" in unavailable.value.why

    @pytest.mark.parametrize(
        ("library", "fix"),
        [
            ("libibverbs.so.1", "libibverbs1"),
            ("libmlx5.so.1", "ibverbs-providers"),
            ("libnuma.so.1", "libnuma1"),
            ("libcuda.so.1", r"kvarena\[mooncake-cpu\]"),
            ("libcudart.so.12", "nvidia-cuda-runtime-cu12"),
            ("libsomething.so", "exactly one of"),
        ],
    )
    def test_a_library_that_is_missing_is_reported_with_the_package(
        self, installed: Any, failing_import: Any, library: str, fix: str
    ) -> None:
        installed("mooncake-transfer-engine")
        failing_import(ImportError(f"{library}: cannot open shared object file: No such file or directory"))
        with pytest.raises(EngineUnavailable, match=fix) as unavailable:
            install.load_transfer_engine()
        assert library in unavailable.value.why
        assert "mooncake-transfer-engine 0.3.13" in unavailable.value.why

    def test_one_without_its_module_is_called_broken(self, installed: Any, failing_import: Any) -> None:
        # Uninstalling one of two variants takes the other's engine.so away.
        installed("mooncake-transfer-engine")
        failing_import(ModuleNotFoundError("No module named 'mooncake.engine'"))
        with pytest.raises(EngineUnavailable, match="broken"):
            install.load_transfer_engine()

    def test_importing_kvarena_loads_neither_mooncake_nor_torch(self) -> None:
        code = "import sys, kvarena.transfer; print({'torch', 'mooncake', 'nixl'} & set(sys.modules))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "set()"


class Scripted:
    """Mooncake's class with answers given in advance; every call is kept."""

    def __init__(self, **answers: list[int]) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append((name, *args))
            queue = self.answers.get(name, [])
            return queue.pop(0) if queue else 0

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def scripted(**answers: list[int]) -> tuple[MooncakeEngine, Scripted]:
    beneath = Scripted(**answers)
    return MooncakeEngine(transfer_engine=beneath), beneath


class TestCodes:
    @pytest.mark.parametrize(
        ("code", "meaning"), [(-1, "invalid"), (-7, "overlaps"), (-202, "device"), (-99, "-99")]
    )
    def test_each_code_of_registering_is_an_error_with_its_meaning(self, code: int, meaning: str) -> None:
        engine, beneath = scripted(register_memory=[0, code])
        with pytest.raises(RegistrationError, match=meaning) as refused:
            engine.register([Region(4096, 10), Region(8192, 20)])
        assert (refused.value.engine, refused.value.region, refused.value.code) == (
            "mooncake",
            (8192, 20),
            code,
        )
        assert beneath.named("unregister_memory") == [(4096,)]
        with pytest.raises(RegistrationError):
            engine.unregister([Region(4096, 10)])

    def test_unregistering_is_one_by_one_and_put_back_when_it_fails(self) -> None:
        engine, beneath = scripted(unregister_memory=[0, -3])
        regions = [Region(4096, 10), Region(8192, 20)]
        engine.register(regions)
        with pytest.raises(RegistrationError) as refused:
            engine.unregister(regions)
        assert (refused.value.code, refused.value.unknown) == (-3, True)
        assert beneath.named("register_memory") == [(4096, 10, "*"), (8192, 20, "*"), (4096, 10, "*")]
        assert not beneath.named("batch_unregister_memory")

    def test_mooncake_never_sees_an_address_that_was_not_registered(self) -> None:
        engine, beneath = scripted()
        engine.register([Region(4096, 10)])
        for region in (Region(4096, 9), Region(4097, 9), Region(1, 1)):
            with pytest.raises(RegistrationError):
                engine.unregister([Region(4096, 10), region])
        assert beneath.named("unregister_memory") == []

    def test_a_start_that_fails_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        beneath = Scripted(initialize=[-101])
        monkeypatch.setattr(start, "load_transfer_engine", lambda: lambda: beneath)
        with pytest.raises(EngineUnavailable, match=r"returned -101 the host name does not resolve"):
            MooncakeEngine("no.such.host")

    def test_a_peer_that_does_not_answer_is_reported_at_once(self) -> None:
        engine, _ = scripted(send_probe=[-102])
        with pytest.raises(TransferFailed, match="does not answer") as failed:
            engine.connect(b'{"session":"10.0.0.1:1","protocol":"tcp"}')
        assert failed.value.code == -102
        assert "mooncake: transfer to " in str(failed.value)
        assert "KVARENA_TRANSFER_HOST" in failed.value.fix

    def test_a_peer_of_another_protocol_is_refused(self) -> None:
        engine, _ = scripted()
        with pytest.raises(TransferFailed, match="mooncake/rdma"):
            engine.connect(b'{"session":"10.0.0.1:1","protocol":"rdma"}')


class TestRetry:
    @staticmethod
    def write(engine: MooncakeEngine, peer: str) -> bool:
        try:
            engine.submit(peer, [0], [0], [1]).wait(5)
        except TransferFailed as error:
            return error.code != -1
        return True

    @pytest.mark.parametrize(
        ("codes", "outcomes", "retries"),
        [
            ([-1], [False], 0),  # refused: told at once
            ([-1, -1, 0], [False, True], 1),  # the next good one may fail for it
            ([-1, -1, -1, 0], [False, False, True], 1),  # but never more than once
            ([-1, 0, -1, 0], [False, True, False, True], 0),
        ],
    )
    def test_only_after_a_failure_and_only_once(
        self, codes: list[int], outcomes: list[bool], retries: int
    ) -> None:
        engine, beneath = scripted(batch_transfer_sync_write=list(codes))
        peer = engine.connect(b'{"session":"10.0.0.1:1","protocol":"tcp"}')
        assert [self.write(engine, peer) for _ in outcomes] == outcomes
        assert engine.retries == retries
        assert len(beneath.named("batch_transfer_sync_write")) == len(codes)
        engine.close()

    def test_not_after_what_took_as_long_as_a_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mooncake_module, "_RETRY_WITHIN_SECONDS", -1.0)
        engine, _ = scripted(batch_transfer_sync_write=[-1, -1, 0])
        peer = engine.connect(b'{"session":"10.0.0.1:1","protocol":"tcp"}')
        assert [self.write(engine, peer) for _ in range(3)] == [False, False, True]
        assert engine.retries == 0


class TestLimits:
    @pytest.mark.parametrize(
        ("environ", "limit"),
        [
            ({}, 1024),
            ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}, 16384),
            ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "100"}, 100),
            ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "lots"}, 1024),
            ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "0"}, 1),
        ],
    )
    def test_batches_fit_the_queue_that_mooncake_has(self, environ: dict[str, str], limit: int) -> None:
        assert start.capabilities_of("tcp", environ).max_batch == limit

    def test_a_larger_batch_is_split_and_stops_at_the_first_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "4")
        engine, beneath = scripted(batch_transfer_sync_write=[0, -1])
        peer = engine.connect(b'{"session":"10.0.0.1:1","protocol":"tcp"}')
        with pytest.raises(TransferFailed):
            engine.submit(peer, range(11), range(11), [1] * 11).wait(5)
        sent = [call[1] for call in beneath.named("batch_transfer_sync_write")]
        assert sent == [[0, 1, 2, 3], [4, 5, 6, 7]]
        engine.close()

    def test_the_environment_is_set_only_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ("MC_FORCE_TCP", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TRANSFER_TIMEOUT")
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setattr(start, "load_transfer_engine", lambda: Scripted)
        MooncakeEngine(protocol="rdma")
        assert [os.environ.get(name) for name in names] == [None, None, None]
        monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "2000")
        MooncakeEngine(timeout=2)
        assert [os.environ.get(name) for name in names] == ["1", "2000", "5"]

    @pytest.mark.parametrize(
        ("version", "environ", "spans"),
        [
            ("0.3.13.post1", {}, False),
            ("0.3.14", {}, True),
            ("0.3.13.post1", {"WITH_NVIDIA_PEERMEM": "1"}, True),
        ],
    )
    def test_rdma_sees_only_the_first_handle_before_0_3_14(
        self, monkeypatch: pytest.MonkeyPatch, version: str, environ: dict[str, str], spans: bool
    ) -> None:
        monkeypatch.setattr(start, "installed_variants", lambda: (("mooncake-transfer-engine", version),))
        assert start.capabilities_of("rdma", environ).spans_handles is spans
        assert start.capabilities_of("nvlink", environ).spans_handles is False


class TestRealLanes:
    """Refused transfers break lanes, so these have an engine pair of their own."""

    @pytest.fixture
    def sides(self, kvarena_peer_process: Any) -> Iterator[tuple[EngineHost, RemoteHost]]:
        factory = Standalone(MooncakeEngine, timeout=5)
        source = EngineHost(factory, HostMemory, 4 * MIB, 4 * MIB)
        target = RemoteHost(kvarena_peer_process(), factory, HostMemory, 4 * MIB, 2 * MIB)
        source.move_ledger()
        target.move_ledger()
        yield source, target
        source.close()

    def test_good_transfers_after_refused_ones_all_arrive(self, sides: tuple[EngineHost, RemoteHost]) -> None:
        source, target = sides
        peer = source.engine.connect(target.describe())
        for i in range(12):
            with pytest.raises(TransferFailed):
                source.engine.submit(peer, [source.base], [target.base + 2 * MIB], [4096]).wait(20)
            word = f"good {i:2}".encode()
            source.write(0, word)
            source.engine.submit(peer, [source.base], [target.base], [len(word)]).wait(20)
            assert target.read(0, len(word)) == word

    def test_a_peer_that_hangs_is_a_timeout_for_the_caller_and_a_failure_for_mooncake(
        self, sides: tuple[EngineHost, RemoteHost]
    ) -> None:
        source, target = sides
        peer = source.engine.connect(target.describe())
        source.engine.submit(peer, [source.base], [target.base], [4096]).wait(20)
        pid = target.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            pending = source.engine.submit(peer, [source.base], [target.base], [2 * MIB])
            with pytest.raises(TransferTimeout):
                pending.wait(0.2)
            assert not pending.done()
            with pytest.raises(TransferFailed):
                pending.wait(90)  # Mooncake itself gives up after 30, and a busy machine is slower
        finally:
            os.kill(pid, signal.SIGCONT)

    def test_a_second_start_in_one_process_has_its_own_port(
        self, sides: tuple[EngineHost, RemoteHost]
    ) -> None:
        other = MooncakeEngine()
        assert isinstance(sides[0].engine, MooncakeEngine)
        assert other.session != sides[0].engine.session
        other.close()
