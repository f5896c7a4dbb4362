"""Registration with engines that SGLang owns: NIXL agents and key-value stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from kvarena.transfer import Capabilities, Region, RegistrationError, TransferFailed

__all__ = ["EngineMemory", "of_mooncake_store", "of_nixl_agent", "of_umbp_client"]


@final
class EngineMemory:
    """The part of a transfer engine that the ledger asks for. Transfers stay SGLang's.

    Parameters
    ----------
    name : str
        For errors and reports.
    register : callable
        Takes a region and returns whatever is needed to take it back; raises `RegistrationError`, or
        anything that the engine raises.
    unregister : callable
        Takes what `register` returned, and the region.
    """

    capabilities = Capabilities(crosses_seams=False, spans_handles=True)

    def __init__(
        self,
        name: str,
        register: Callable[[Region], Any],
        unregister: Callable[[Any, Region], Any],
    ) -> None:
        self.name = name
        self._register = register
        self._unregister = unregister
        self._held: dict[Region, Any] = {}

    @property
    def descriptors(self) -> list[Any]:
        """What the engine returned for each region."""
        return list(self._held.values())

    def register(self, regions: Sequence[Region]) -> None:
        """All or nothing."""
        done: list[Region] = []
        try:
            for region in regions:
                self._held[region] = self._call("register", region, self._register, region)
                done.append(region)
        except RegistrationError:
            self.unregister(done)
            raise

    def unregister(self, regions: Sequence[Region]) -> None:
        """By what registration returned."""
        for region in regions:
            if region not in self._held:
                raise RegistrationError(
                    self.name, region, None, action="unregister", meaning="not registered", unknown=True
                )
            self._call("unregister", region, self._unregister, self._held[region], region)
            del self._held[region]

    def _call(self, action: str, region: Region, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RegistrationError:
            raise
        except Exception as error:
            # NIXL's exceptions are its return codes; a store's RPC may raise anything.
            raise RegistrationError(
                self.name, region, type(error).__name__, action=action, meaning=str(error)
            ) from error

    def describe(self) -> bytes:
        """SGLang tells peers itself."""
        return b""

    def connect(self, description: bytes) -> str:
        """Not through kvarena."""
        self._transfers_are_sglangs()

    def disconnect(self, peer: str) -> None:
        """Not through kvarena: there is nobody to forget."""

    def submit(self, peer: str, src: Any, dst: Any, lengths: Any) -> Any:
        """Not through kvarena."""
        self._transfers_are_sglangs()

    def close(self) -> None:
        """Let go of every region."""
        self.unregister(list(self._held))

    def _transfers_are_sglangs(self) -> NoReturn:
        raise TransferFailed(self.name, "?", None, "this adapter only registers; SGLang transfers itself")


def of_nixl_agent(agent: Any, memory: str, device: int) -> EngineMemory:
    """One kind of memory of a NIXL agent.

    Parameters
    ----------
    agent : nixl_agent
        SGLang's.
    memory : {"VRAM", "DRAM"}
        NIXL's word for where it lies.
    device : int
        The GPU's number; 0 for DRAM.
    """
    name = f"nixl-{memory.lower()}"

    def register(region: Region) -> Any:
        answer = agent.register_memory([(region.address, region.nbytes, device, "")], memory)
        if not answer:
            raise RegistrationError(name, region, repr(answer), meaning="NIXL returned no descriptors")
        return answer

    return EngineMemory(name, register, lambda descriptors, region: agent.deregister_memory(descriptors))


def of_mooncake_store(store: Any) -> EngineMemory:
    """Mooncake's distributed store, which answers with a code."""
    name = "mooncake-store"

    def check(code: Any, region: Region, action: str) -> Any:
        if code not in (0, None):
            raise RegistrationError(name, region, code, action=action)
        return code

    return EngineMemory(
        name,
        lambda region: check(store.register_buffer(region.address, region.nbytes), region, "register"),
        lambda _, region: check(store.unregister_buffer(region.address), region, "unregister"),
    )


def of_umbp_client(client: Any) -> EngineMemory:
    """UMBP's client, which answers with a truth value."""
    name = "umbp"

    def register(region: Region) -> Any:
        if not client.register_memory(region.address, region.nbytes):
            raise RegistrationError(name, region, "False")
        return True

    return EngineMemory(name, register, lambda _, region: client.deregister_memory(region.address))
