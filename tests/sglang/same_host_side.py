"""One side of a prefill/decode pair: SGLang's own Mooncake engine and KV manager over an arena of ours.

Run as a program, it is the decode side: ``KVARENA_SAME_HOST`` comes from the environment, SGLang's
`load_plugins` attaches kvarena, and a descriptor that was handed over carries commands.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CONN = "sglang.srt.disaggregation.mooncake.conn"
WRAPPER = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"
PAGE_BYTES = 512
AUX_BYTES, AUX_ITEM = 4096, 64


class Side:
    """A finalized pool, a KV manager of the release, and a real Mooncake engine over TCP."""

    def __init__(self, rig: Any, *, role: str = "prefill", finalize: bool = True, engine: Any = None) -> None:
        from kvarena.plugin.engines.sglang.families.shapes import resolve

        self.rig = rig
        self.bundle = rig.reserved(8192, 4096)
        self.config = rig.config(4096, 2048)
        if finalize:
            self.bundle.resize(self.config)
        self.bound = self.bundle.bound
        self.aux = torch.zeros(AUX_BYTES, dtype=torch.uint8)
        self.engine = engine or resolve(WRAPPER)("127.0.0.1")
        self.session: str = self.engine.get_session_id()
        manager = object.__new__(resolve(f"{CONN}.MooncakeKVManager"))
        base, nbytes = self.bound.arena.base, self.bound.active_allocation_bytes
        manager.kv_args = SimpleNamespace(
            kv_data_ptrs=[base], kv_data_lens=[nbytes], kv_item_lens=[PAGE_BYTES], kv_data_mem_kinds=["VRAM"],
            aux_data_ptrs=[self.aux.data_ptr()], aux_data_lens=[AUX_BYTES], aux_item_lens=[AUX_ITEM],
            state_data_ptrs=[[base]], state_data_lens=[[nbytes]], gpu_id=0, kv_layer_ids=[0],
        )  # fmt: skip
        manager.engine = self.engine
        manager.disaggregation_mode = SimpleNamespace(value=role)
        manager.connection_pool, manager.connection_lock = {}, threading.Lock()
        manager.enable_custom_mem_pool, manager.custom_mem_pool_type = False, None
        manager.is_mla_backend = manager.is_hybrid_mla_backend = False
        manager.max_transfer_batch_indices, manager.pp_size = 0, 1
        self.manager = manager
        manager.register_buffer_to_engine()

    @property
    def path(self) -> Any:
        from kvarena.plugin.engines.sglang.same_host.mooncake_hooks import transfers_of

        return transfers_of(self.engine)

    @property
    def bytes(self) -> torch.Tensor:
        """What is backed."""
        return self.bundle.pool._raw[: self.bound.arena.backed_bytes]

    def block(self, peer: Peer, src_page: int, dst_page: int, pages: int = 1) -> tuple[int, int, int]:
        """Pages of the arena for pages of the peer's, as SGLang writes it: source, destination, bytes."""
        src = self.bound.arena.base + src_page * PAGE_BYTES
        return src, peer.told["base"] + dst_page * PAGE_BYTES, pages * PAGE_BYTES

    def aux_block(self, peer: Peer, item: int = 0) -> tuple[int, int, int]:
        """The same for an item of the aux buffer."""
        offset = item * AUX_ITEM
        return self.aux.data_ptr() + offset, peer.told["aux"] + offset, AUX_ITEM

    def page(self, page: int, pages: int = 1) -> bytes:
        return self.read(page * PAGE_BYTES, pages * PAGE_BYTES)

    def spy(self) -> Spy:
        """Write down from now on what Mooncake is given."""
        self.engine.engine = Spy(getattr(self.engine.engine, "real", self.engine.engine))
        return self.engine.engine

    def fill(self) -> None:
        """Bytes that are different everywhere."""
        generator = torch.Generator().manual_seed(3)
        self.bytes.copy_(torch.randint(0, 256, self.bytes.shape, dtype=torch.uint8, generator=generator))
        self.aux.copy_(torch.arange(self.aux.numel()) % 251)

    def close(self) -> None:
        self.manager.deregister_buffer_to_engine()

    # What follows is called from the other process, too: it takes and gives plain values.

    def tell(self) -> dict[str, Any]:
        from kvarena.plugin.engines.sglang.applied import handlers_of
        from kvarena.plugin.engines.sglang.families.shapes import resolve
        from kvarena.plugin.engines.sglang.same_host import mooncake_hooks as same_host

        return {
            "session": self.session,
            "base": self.bound.arena.base,
            "backed": self.bound.arena.backed_bytes,
            "aux": self.aux.data_ptr(),
            "socket": None if self.path is None else str(self.path.socket_path),
            "registered": [(ledger.engine.name, ledger.registered_bytes) for ledger in self.bound.ledgers],
            "hooked": [
                target.path
                for target in same_host.hook_targets()
                if getattr(same_host, target.path.rpartition(".")[2]) in handlers_of(resolve(target.path))
            ],
        }

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.bytes[offset : offset + nbytes].numpy().tobytes()

    def read_aux(self, offset: int, nbytes: int) -> bytes:
        return self.aux[offset : offset + nbytes].numpy().tobytes()

    def clear(self) -> None:
        self.bytes.zero_()
        self.aux.zero_()

    def step_down(self) -> None:
        """What SGLang does in a role switch, before."""
        self.manager.deregister_buffer_to_engine()

    def step_up(self) -> None:
        """And after."""
        self.manager.register_buffer_to_engine()

    def let_go(self) -> None:
        """What the path does at the start of a resize."""
        self.path.withdrawing(self.path.ledger)
        self.path.ledger.clear()

    def follow(self) -> None:
        """And at its end."""
        self.bound.keeper.register(self.path.ledger)

    def lose_socket(self) -> None:
        self.path.socket_path.unlink()

    def finalize(self) -> None:
        self.bundle.resize(self.config)

    def die(self) -> None:
        os._exit(9)


class Spy:
    """SGLang's raw Mooncake engine; writes down what is given to it."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.batches: list[tuple[str, list[int], list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def batch_transfer_sync_write(
        self, session: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        self.batches.append((session, src, dst, lengths))
        return int(self.real.batch_transfer_sync_write(session, src, dst, lengths))

    def transfer_sync_write(self, session: str, src: int, dst: int, length: int) -> int:
        self.batches.append((session, [src], [dst], [length]))
        return int(self.real.transfer_sync_write(session, src, dst, length))

    @property
    def nbytes(self) -> int:
        return sum(sum(lengths) for *_, lengths in self.batches)


class Peer:
    """A `Side` in a process of its own."""

    def __init__(self, release: str, directory: Path, *, finalize: bool = True) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Whatever SGLang logs goes nowhere; failures come back as answers.
            command = [sys.executable, __file__, str(theirs.fileno()), release, str(int(finalize))]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=None if os.environ.get("KVARENA_TEST_LOUD") else subprocess.DEVNULL,
                env=os.environ
                | {"KVARENA_ENABLE": "1", "KVARENA_SGLANG_EXPERIMENTAL": "1", "KVARENA_STATUS": "0"}
                | {"KVARENA_SAME_HOST": "1", "KVARENA_SOCKET_DIR": str(directory)},
            )
        self.connection = Connection(ours.detach())
        self.told: dict[str, Any] = {}

    def wait(self) -> Peer:
        """Until it has registered."""
        self.told = self.ask("tell")
        return self

    def ask(self, what: str, *args: Any) -> Any:
        self.connection.send((what, args))
        if not self.connection.poll(120):
            raise TimeoutError(f"{what}: no answer from the peer")
        ended, answer = self.connection.recv()
        if ended == "error":
            raise RuntimeError(f"{what}: {answer}")
        return answer

    def page(self, page: int, pages: int = 1) -> bytes:
        return bytes(self.ask("read", page * PAGE_BYTES, pages * PAGE_BYTES))

    def kill(self) -> None:
        self.connection.send(("die", ()))
        self.process.wait(30)

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    import pytest

    connection, release, finalize = Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3] == "1"
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        # A program finds its neighbours by their names.
        import mocks

        mocks.install()
        from rig import Release, Rig

        rig = Rig(Release(release), patch)
        side = Side(rig, role="decode", finalize=finalize)
        while True:
            try:
                what, args = connection.recv()
            except EOFError:
                break
            try:
                connection.send(("answer", getattr(side, what)(*args)))
            except Exception as error:  # noqa: BLE001 - whoever asked wants it
                connection.send(("error", repr(error)))
        rig.close()


if __name__ == "__main__":
    main()
