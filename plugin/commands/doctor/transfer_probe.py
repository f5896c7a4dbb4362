"""A child that is one end of a short transfer: ordinary memory first, then the memory of an arena."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.doctor.blocks import Block, make_block, make_plain_block
from kvarena.plugin.commands.doctor.child import emit, take_stdout
from kvarena.transfer import Region, TransferEngine

__all__ = ["main"]

PAGE_BYTES = 16 << 10
_ROUNDS = 3
_PATTERN = 7
_TIMEOUT_S = 20.0


def main(arguments: Sequence[str]) -> int:
    """``receive|send ENGINE DEVICE BYTES [DIRECTORY]``."""
    take_stdout()
    role, name, device, nbytes, *directory = arguments
    try:
        end = _End(name, device, int(nbytes), directory[0] if directory else None)
        (end.receive if role == "receive" else end.send)()
    except KvArenaError as error:
        emit({"error": str(error)})
    return 0


class _End:
    def __init__(self, name: str, device: str, nbytes: int, directory: str | None) -> None:
        from kvarena.plugin.composition import make_manager
        from kvarena.plugin.config import load_settings
        from kvarena.pool.arena import Arena

        settings = load_settings()
        manager = make_manager(settings)
        self._arena = Arena(_make_driver(device, manager), nbytes)
        self._arena.back(nbytes)
        self._engine = _make_engine(name, self._arena, directory, manager, settings)
        self._blocks: dict[str, Block] = {}
        if name != "same-host":  # which maps arenas, and nothing else
            self._blocks["plain"] = make_plain_block(device, nbytes)
        self._blocks["arena"] = make_block(self._arena)
        for block in self._blocks.values():
            block.fill(0)
            self._engine.register([Region(block.address, block.nbytes)])

    def receive(self) -> None:
        """Say where our memory is, then say for each kind whether it has arrived."""
        emit(
            {
                "description": base64.b64encode(self._engine.describe()).decode(),
                "addresses": {kind: block.address for kind, block in self._blocks.items()},
            }
        )
        for line in sys.stdin:
            kind = line.strip()
            if kind not in self._blocks:
                break
            emit({"arrived": self._blocks[kind].holds(_PATTERN)})
        self._engine.close()

    def send(self) -> None:
        """Write each kind of memory as one range, then as scattered pages."""
        hello = json.loads(sys.stdin.readline())
        began = time.perf_counter()
        peer = self._engine.connect(base64.b64decode(hello["description"]))
        emit({"connect_ms": (time.perf_counter() - began) * 1e3})
        for kind, block in self._blocks.items():
            block.fill(_PATTERN)
            target = hello["addresses"][kind]
            whole = np.array([block.nbytes], np.int64)
            one = self._best(peer, block, np.array([block.address]), np.array([target]), whole)
            offsets = np.random.default_rng(0).permutation(block.nbytes // PAGE_BYTES) * PAGE_BYTES
            lengths = np.full(len(offsets), PAGE_BYTES, np.int64)
            pages = self._best(peer, block, block.address + offsets, target + offsets, lengths)
            emit({"kind": kind, "gb_per_s": one, "pages_gb_per_s": pages})
        sys.stdin.readline()  # the receiver looks before we let go
        self._engine.close()

    def _best(
        self,
        peer: str,
        block: Block,
        src: npt.NDArray[np.int64],
        dst: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> float:
        best = 0.0
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            self._engine.submit(peer, src, dst, lengths).wait(_TIMEOUT_S)
            best = max(best, block.nbytes / (time.perf_counter() - began) / 1e9)
            if block.nbytes / 1e9 / best > 2:
                break  # so slow that once is enough
        return best


def _make_driver(device: str, manager: Any) -> Any:
    if device == "cpu":  # without torch, whose import takes longer than all the rest
        from kvarena.pool.host_vmm import HostVmm

        return HostVmm()
    import torch

    return manager.hook.kvarena_driver(device=torch.device(device))


def _make_engine(name: str, arena: Any, directory: str | None, manager: Any, settings: Any) -> TransferEngine:
    from kvarena.hooks import TransferConfig

    config = TransferConfig(
        engines=(name,),
        hostname=settings.transfer_host,
        timeout_s=_TIMEOUT_S,
        arena=arena,
        socket_dir=directory,
    )
    answers = manager.hook.kvarena_transfer_engines(config=config)
    engines: list[TransferEngine] = [engine for answer in answers for engine in answer or ()]
    if not engines:
        raise KvArenaError(f"no plugin provides the transfer engine {name}.", fix="Install it.")
    return engines[0]
