"""Manifests: two arenas whose pages mean different bytes never exchange one."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from kvarena.transfer import (
    ArenaPages,
    Manifest,
    ManifestMismatch,
    PageChannel,
    RecordingEngine,
    Region,
    RegistrationLedger,
    SubPoolManifest,
)

FULL = SubPoolManifest(
    name="full", page_bytes=32768, page_size=16, layers=(0, 2), dtype="bfloat16", parallel_slice=(0, 2)
)
WINDOW = SubPoolManifest(name="swa", page_bytes=16384, page_size=16, layers=(1,), dtype="bfloat16")
OURS = Manifest(sub_pools=(FULL, WINDOW))


def with_full(**changes: Any) -> Manifest:
    return Manifest(sub_pools=(msgspec.structs.replace(FULL, **changes), WINDOW))


def channel(manifest: Manifest, engine: RecordingEngine | None = None) -> PageChannel:
    ledger = RegistrationLedger(engine or RecordingEngine(moves_memory=False))
    ledger.move_to([Region(1 << 40, 1 << 20)], backed=Region(1 << 40, 1 << 20))
    return PageChannel(
        ledger, manifest, lambda: {"full": ArenaPages(1 << 40, 32), "swa": ArenaPages(1 << 40, 64)}
    )


def test_equal_manifests_fit() -> None:
    OURS.check(Manifest.decode(OURS.encode()))


def test_the_same_numbers_in_lists_and_arrays_fit() -> None:
    """As a peer's arrive they are tuples of Python's numbers, and these were refused as others."""
    numbers: dict[str, Any] = {
        "page_bytes": np.int64(32768),
        "page_size": np.int32(16),
        "layers": np.array([0, 2]),
        "parallel_slice": [0, 2],
    }
    written = Manifest(sub_pools=(SubPoolManifest(name="full", dtype="bfloat16", **numbers), WINDOW))
    for theirs in (OURS, Manifest.decode(written.encode())):
        written.check(theirs)
        theirs.check(written)
    assert written == OURS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_bytes", 65536),
        ("page_size", 32),
        ("layers", (0, 3)),
        ("dtype", "float8_e4m3fn"),
        ("kind", "mla"),
        ("parallel_slice", (1, 2)),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(field: str, value: object) -> None:
    with pytest.raises(ManifestMismatch) as mismatch:
        OURS.check(with_full(**{field: value}))
    (difference,) = mismatch.value.differences
    assert difference == (f"full.{field}", getattr(FULL, field), value)
    assert repr(value) in str(mismatch.value)
    assert repr(getattr(FULL, field)) in str(mismatch.value)


def test_a_dtype_that_differs_is_refused_with_both_values_before_anything_moves() -> None:
    # Public case O3: prefill in bf16, decode in fp8.
    engine = RecordingEngine(moves_memory=False)
    prefill = channel(OURS, engine)
    narrow = channel(with_full(dtype="float8_e4m3fn", page_bytes=16384))
    matching = channel(OURS)
    with pytest.raises(ManifestMismatch) as mismatch:
        prefill.connect(narrow.hello())
    assert mismatch.value.differences == (
        ("full.dtype", "bfloat16", "float8_e4m3fn"),
        ("full.page_bytes", 32768, 16384),
    )
    assert [call.op for call in engine.calls] == ["register"]
    assert prefill.connect(matching.hello()) == matching.engine.describe().decode()
    assert narrow.ledger.regions == prefill.ledger.regions  # neither side lost anything


def test_sub_pools_must_be_the_same_in_number_and_order() -> None:
    twice = msgspec.structs.replace(FULL, dtype="float16"), FULL, WINDOW
    for theirs in ((FULL,), (WINDOW, FULL), (FULL, WINDOW, WINDOW), twice):
        with pytest.raises(ManifestMismatch, match="sub_pools"):
            OURS.check(Manifest(sub_pools=theirs))


def test_layout_and_version_count() -> None:
    with pytest.raises(ManifestMismatch) as mismatch:
        OURS.check(Manifest(sub_pools=OURS.sub_pools, layout="layer-major", version=2))
    assert [difference.field for difference in mismatch.value.differences] == ["layout", "version"]


@pytest.mark.parametrize("encoded", [b"", b"\xff", b"\x80", msgspec.msgpack.encode({"sub_pools": 3})])
def test_what_is_no_manifest_is_refused(encoded: bytes) -> None:
    with pytest.raises(ManifestMismatch, match="manifest"):
        Manifest.decode(encoded)


def test_another_engine_is_refused_by_name() -> None:
    with pytest.raises(ManifestMismatch, match="'recording', theirs 'other'"):
        channel(OURS).connect(channel(OURS, RecordingEngine("other", moves_memory=False)).hello())


def test_errors_travel_between_processes() -> None:
    with pytest.raises(ManifestMismatch) as mismatch:
        OURS.check(with_full(dtype="float16"))
    copy = pickle.loads(pickle.dumps(mismatch.value))
    assert type(copy) is ManifestMismatch
    assert (str(copy), copy.differences) == (str(mismatch.value), mismatch.value.differences)
