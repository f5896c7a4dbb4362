"""The contract tests need one real SGLang release each, which prepare.py puts on the path."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
RELEASE = os.environ.get("KVARENA_CONTRACT_RELEASE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a release there is nothing to test against."""
    skip = pytest.mark.skip(reason="needs a real SGLang wheel: make contract")
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("sglang") and not RELEASE:
            item.add_marker(skip)


def _load(name: str) -> ModuleType:
    """A helper of this folder, under a name that no other test folder has."""
    full = f"kvarena_tests_sglang_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


@pytest.fixture(scope="session")
def rig_module() -> ModuleType:
    """Helpers that need no fixture of their own."""
    return _load("rig")


@pytest.fixture(scope="session")
def runner_module() -> ModuleType:
    """Builds model runners."""
    return _load("runner")


@pytest.fixture(scope="session")
def sglang() -> Iterator[Any]:
    """The release, imported, with kvarena attached by SGLang's own `load_plugins`."""
    assert RELEASE
    patch = pytest.MonkeyPatch()
    patch.setenv("KVARENA_ENABLE", "1")
    patch.setenv("KVARENA_SGLANG_EXPERIMENTAL", "1")
    patch.setenv("KVARENA_STATUS", "0")
    with warnings.catch_warnings():
        # What SGLang and transformers warn about at import is not ours to judge.
        warnings.simplefilter("ignore")
        _load("mocks").install()
        yield _load("rig").Release(RELEASE)
    patch.undo()


@pytest.fixture
def rig(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds pools of the release; closes whatever a test leaves open."""
    rig = _load("rig").Rig(sglang, monkeypatch)
    yield rig
    rig.close()


@pytest.fixture(scope="session")
def same_host_side() -> ModuleType:
    """What both sides of a pair on this host are made of."""
    pytest.importorskip("mooncake.engine", reason="no Mooncake", exc_type=ImportError)
    return _load("same_host_side")


@pytest.fixture(scope="session")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both sides of a pair look for each other."""
    made = tmp_path_factory.mktemp("sh")
    made.chmod(0o700)
    return made


@pytest.fixture(scope="session")
def peers(same_host_side: Any, sockets: Path) -> Iterator[list[Any]]:
    """Importing SGLang takes seconds: one process serves all tests until one kills it.

    Does not ask for SGLang here, so that both processes may import it at the same time.
    """
    assert RELEASE
    started = [same_host_side.Peer(RELEASE, sockets)]
    yield started
    for peer in started:
        peer.close()


@pytest.fixture(scope="session")
def sides(peers: list[Any], same_host_side: Any, request: pytest.FixtureRequest) -> Any:
    """The same module, when this process is hooked as `attach` does it where the setting is given."""
    from kvarena.plugin.engines.sglang.families.shapes import resolve
    from kvarena.plugin.engines.sglang.same_host import mooncake_hooks as same_host

    registry = request.getfixturevalue("sglang").registry
    same_host.register_hooks(registry, resolve("sglang.srt.plugins.hook_registry.HookType").AROUND)
    registry.apply_hooks()
    return same_host_side


@pytest.fixture(scope="session")
def shared_engine(sides: Any) -> Any:
    """SGLang's wrapper of a Mooncake engine, which takes a second to go."""
    from kvarena.plugin.engines.sglang.families.shapes import resolve

    return resolve(sides.WRAPPER)("127.0.0.1")


@pytest.fixture
def peer(peers: list[Any], sides: Any, sglang: Any, sockets: Path) -> Any:
    """The decode side: a process that SGLang's plugin loader and the environment alone have set up."""
    if peers[-1].process.poll() is not None:
        peers.append(sides.Peer(sglang.version, sockets))
    if not peers[-1].told:
        peers[-1].wait()
    peers[-1].ask("clear")
    return peers[-1]


@pytest.fixture
def switch(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``KVARENA_SAME_HOST=1`` for this test."""
    import msgspec
    from kvarena.plugin.engines.sglang.runtime import runtime

    assert runtime.settings is not None
    changed = msgspec.structs.replace(
        runtime.settings, same_host=True, socket_dir=str(sockets), transfer_timeout=5.0
    )
    monkeypatch.setattr(runtime, "settings", changed)


@pytest.fixture
def make_side(sides: Any, rig: Any, switch: None, shared_engine: Any) -> Iterator[Callable[..., Any]]:
    """Makes prefill sides in this process."""
    made = []

    def make(*, own_engine: bool = False, **options: Any) -> Any:
        """`own_engine`: after a refused transfer, Mooncake may refuse the next one, too."""
        made.append(sides.Side(rig, engine=None if own_engine else shared_engine, **options))
        made[-1].mooncake = made[-1].spy()
        made[-1].fill()
        return made[-1]

    yield make
    for side in made:
        side.close()


@pytest.fixture
def side(make_side: Callable[..., Any]) -> Any:
    """One of them."""
    return make_side()


@pytest.fixture
def own(make_side: Callable[..., Any]) -> Any:
    """One whose transfers may be refused."""
    return make_side(own_engine=True)
