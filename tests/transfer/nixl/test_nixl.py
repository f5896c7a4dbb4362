"""What is particular to NIXL: installation, metadata that can only be added to, the slow path."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kvarena.transfer import (
    EngineUnavailable,
    NixlEngine,
    Region,
    RegistrationError,
    TransferFailed,
    slow_path_reason,
)
from kvarena.transfer.nixl import engine as nixl_module
from kvarena.transfer.nixl import install
from kvarena.transfer.testing import EngineHost, HostMemory, Standalone

KIB = 1024


class TestInstallation:
    @pytest.fixture
    def modules(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def install(**errors: ImportError) -> None:
            def load(name: str) -> Any:
                package = name.split(".")[0]
                raise errors.get(package, ModuleNotFoundError(f"No module named {package!r}", name=package))

            monkeypatch.setattr(importlib, "import_module", load)

        return install

    def test_none_is_reported_with_the_extras(self, modules: Any) -> None:
        modules()
        with pytest.raises(EngineUnavailable, match=r"not installed.*kvarena\[nixl-cu12\]"):
            NixlEngine()

    def test_one_that_does_not_load_is_reported_with_its_reason(self, modules: Any) -> None:
        modules(
            nixl_cu12=ImportError("libucp.so.0: cannot open shared object file"),
            nixl=ModuleNotFoundError("No module named 'torch'", name="torch"),
        )
        with pytest.raises(EngineUnavailable) as unavailable:
            install.load_nixl()
        assert "libucp.so.0" in unavailable.value.why
        assert "nixl is installed, but torch is missing" in unavailable.value.why


class TestSlowPath:
    def test_vmm_memory_without_fabric_is_named_with_the_figures_and_the_way_out(self) -> None:
        reason = slow_path_reason(memory="VRAM", vmm=True, fabric=False)
        assert reason is not None
        assert "0.44 GB/s" in reason
        assert "KVARENA_SAME_HOST=1" in reason
        between_hosts = slow_path_reason(memory="VRAM", vmm=True, fabric=False, same_host=False)
        assert between_hosts is not None
        assert "RDMA" in between_hosts

    @pytest.mark.parametrize(
        ("memory", "vmm", "fabric"), [("DRAM", True, False), ("VRAM", False, False), ("VRAM", True, True)]
    )
    def test_other_memory_is_fast(self, memory: str, vmm: bool, fabric: bool) -> None:
        assert slow_path_reason(memory=memory, vmm=vmm, fabric=fabric) is None

    def test_it_is_warned_of_once_in_a_process(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(nixl_module, "_warned_of_slow_path", threading.Event())
        for _ in range(2):
            NixlEngine(memory="VRAM", vmm=True).close()
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "emulates" in warnings[0].message


class TestTwoDevices:
    """NIXL looks memory up by address, kind and device: each side's own."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[EngineHost, EngineHost]]:
        engines = [Standalone(NixlEngine, device_id=device) for device in (1, 3)]
        hosts = [EngineHost(engine, HostMemory, 64 * KIB, 64 * KIB) for engine in engines]
        for host in hosts:
            host.move_ledger()
        yield hosts[0], hosts[1]
        for host in hosts:
            host.close()

    def test_pages_go_from_one_to_the_other_and_back(self, pair: tuple[EngineHost, EngineHost]) -> None:
        for source, target in (pair, pair[::-1]):
            peer = source.engine.connect(target.describe())
            source.write(0, b"from here")
            source.engine.submit(peer, [source.base], [target.base + KIB], [9]).wait(20)
            assert target.read(KIB, 9) == b"from here"

    @pytest.mark.parametrize("wrong", [{"device_id": -1}, {"device_id": 1 << 31}, {"memory": "TAPE"}])
    def test_a_peer_that_names_no_device_is_refused(
        self, pair: tuple[EngineHost, EngineHost], wrong: dict[str, Any]
    ) -> None:
        told = msgspec.msgpack.decode(pair[1].describe())
        told["place"] |= wrong
        with pytest.raises(TransferFailed, match="not a NIXL description"):
            pair[0].engine.connect(msgspec.msgpack.encode(told))


class Spy:
    """A NIXL agent whose calls about remote metadata are kept."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("add_remote_agent", "remove_remote_agent"):
            self.calls.append(name.split("_")[0])
        return getattr(self._agent, name)


class TestMetadata:
    @pytest.fixture
    def pair(self) -> Iterator[tuple[EngineHost, EngineHost]]:
        hosts = [EngineHost(Standalone(NixlEngine), HostMemory, 1024 * KIB, 1024 * KIB) for _ in range(2)]
        hosts[0].move_ledger()
        yield hosts[0], hosts[1]
        for host in hosts:
            host.close()

    @staticmethod
    def spy_on(host: EngineHost) -> Spy:
        assert isinstance(host.engine, NixlEngine)
        spy = Spy(host.engine._agent)
        host.engine._agent = spy
        return spy

    @staticmethod
    def write(source: EngineHost, target: EngineHost, peer: str, offset: int) -> None:
        word = f"at {offset}".encode()
        source.write(0, word)
        source.engine.submit(peer, [source.base], [target.base + offset], [len(word)]).wait(20)
        assert target.read(offset, len(word)) == word

    def test_an_addition_is_added_and_a_replacement_removes_first(
        self, pair: tuple[EngineHost, EngineHost]
    ) -> None:
        source, target = pair
        spy = self.spy_on(source)
        target.register((0, 256 * KIB))
        peer = source.engine.connect(target.describe())
        assert spy.calls == ["add", "add"]  # the connection, the region
        source.engine.connect(target.describe())
        assert spy.calls == ["add", "add"]

        spy.calls.clear()
        target.register((256 * KIB, 256 * KIB))
        with pytest.raises(TransferFailed) as unknown:
            self.write(source, target, peer, 256 * KIB)
        assert unknown.value.code == "NOT_FOUND"
        assert source.engine.connect(target.describe()) == peer
        assert spy.calls == ["add"]
        self.write(source, target, peer, 256 * KIB)
        self.write(source, target, peer, 128)

        spy.calls.clear()
        target.unregister((0, 256 * KIB), (256 * KIB, 256 * KIB))
        target.register((0, 1024 * KIB))
        assert source.engine.connect(target.describe()) == peer
        assert spy.calls == ["remove", "add", "add"]
        self.write(source, target, peer, 256 * KIB - 2)  # across what was a seam
        self.write(source, target, peer, 1000 * KIB)

    def test_the_same_bytes_registered_anew_are_another_registration(
        self, pair: tuple[EngineHost, EngineHost]
    ) -> None:
        # On RDMA the key differs, and NIXL refuses to change the one that it has.
        source, target = pair
        spy = self.spy_on(source)
        target.register((0, 256 * KIB))
        source.engine.connect(target.describe())
        target.unregister((0, 256 * KIB))
        target.register((0, 256 * KIB))
        spy.calls.clear()
        peer = source.engine.connect(target.describe())
        assert spy.calls == ["remove", "add", "add"]
        self.write(source, target, peer, 64)

    def test_a_nested_region_that_would_hide_the_larger_one_is_refused(
        self, pair: tuple[EngineHost, EngineHost]
    ) -> None:
        source, target = pair
        target.register((0, 1024 * KIB))
        with pytest.raises(RegistrationError, match="overlaps"):
            target.register((64 * KIB, 64 * KIB))
        self.write(source, target, source.engine.connect(target.describe()), 256 * KIB)

    def test_a_transfer_that_nixl_never_ends_is_given_up(
        self, pair: tuple[EngineHost, EngineHost], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, target = pair
        target.move_ledger()
        peer = source.engine.connect(target.describe())
        engine = source.engine
        assert isinstance(engine, NixlEngine)
        monkeypatch.setattr(engine._agent, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(engine._agent, "check_xfer_state", lambda handle: "PROC")
        monkeypatch.setattr(engine, "_timeout", 0.05)
        with pytest.raises(TransferFailed, match="no end after") as failed:
            engine.submit(peer, [source.base], [target.base], [16]).wait(20)
        assert failed.value.code == "TIMEOUT"
        monkeypatch.setattr(engine, "_timeout", 30.0)
        pending = engine.submit(peer, [source.base], [target.base], [16])
        engine.disconnect(peer)
        with pytest.raises(TransferFailed):
            pending.wait(20)

    def test_a_registration_that_nixl_refuses_is_an_error_with_its_status(
        self, pair: tuple[EngineHost, EngineHost], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, target = pair
        engine = target.engine
        assert isinstance(engine, NixlEngine)

        def refuse(*_: object) -> None:
            raise engine._bindings.nixlBackendError("NIXL_ERR_BACKEND")

        target.register((0, 4 * KIB))
        monkeypatch.setattr(engine._agent, "register_memory", refuse)
        with pytest.raises(RegistrationError) as refused:
            target.register((8 * KIB, 4 * KIB))
        assert (refused.value.code, refused.value.region) == (
            "BACKEND",
            Region(target.base + 8 * KIB, 4 * KIB),
        )
        monkeypatch.undo()
        monkeypatch.setattr(engine._agent, "deregister_memory", refuse)
        with pytest.raises(RegistrationError) as refused:
            target.unregister((0, 4 * KIB))
        assert (refused.value.code, refused.value.action) == ("BACKEND", "unregister")
        monkeypatch.undo()
        target.unregister((0, 4 * KIB))
