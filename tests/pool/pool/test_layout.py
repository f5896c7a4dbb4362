from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvarena.pool import HostVmm, LayoutError, MambaSubPoolSpec, MHASubPoolSpec, MLASubPoolSpec, UnifiedKVPool
from kvarena.pool.layout import GrowDirection, SubPoolSpec, chain_order

BF16 = torch.bfloat16


def test_entries_are_what_the_field_counts() -> None:
    # Llama 3.1 70B at tensor-parallel 8: 80 layers of one KV head of 128, keys and values, 2 bytes.
    assert MHASubPoolSpec("full", "up", 80, 1, 128, BF16).entry_bytes() == 40960
    # DeepSeek V3: 61 layers of 512 + 64.
    assert MLASubPoolSpec("full", "up", 61, 512, 64, BF16).entry_bytes() == 70272
    assert MHASubPoolSpec("full", "up", 2, 4, 192, torch.float8_e4m3fn, v_head_dim=128).entry_bytes() == 2560


def test_an_envelope_is_page_size_entries_but_a_state_is_one() -> None:
    mha = MHASubPoolSpec("a", "up", 3, 2, 8, BF16)
    assert mha.page_envelope_bytes(16) == 16 * mha.entry_bytes()
    mamba = MambaSubPoolSpec("m", "float", 3, ((5, 3),), (2, 4), BF16)
    assert mamba.page_envelope_bytes(16) == mamba.page_envelope_bytes() == mamba.entry_bytes()
    # 30 bytes of convolution, 2 to align, 32 of float32.
    assert mamba.entry_bytes() == 3 * (30 + 2 + 32)


@st.composite
def specs(draw: st.DrawFn) -> tuple[SubPoolSpec, ...]:
    """A chain of one to four sub-pools of any kind."""
    small = st.integers(1, 4)
    dtype = st.sampled_from([BF16, torch.float32, torch.uint8])
    chains: list[tuple[GrowDirection, ...]] = [
        ("up",),
        ("down",),
        ("up", "down"),
        ("up", "float", "down", "float"),
    ]
    directions = draw(st.sampled_from(chains))
    made: list[SubPoolSpec] = []
    for index, direction in enumerate(directions):
        kind = draw(st.sampled_from(["mha", "mla", "mamba"]))
        name: str = f"{kind}{index}"
        if kind == "mha":
            v_dim = draw(st.none() | small)
            made.append(MHASubPoolSpec(name, direction, *draw(st.tuples(small, small, small, dtype)), v_dim))
        elif kind == "mla":
            made.append(MLASubPoolSpec(name, direction, *draw(st.tuples(small, small, small, dtype))))
        else:
            shapes = draw(st.lists(st.tuples(small, small), min_size=1, max_size=2).map(tuple))
            made.append(
                MambaSubPoolSpec(
                    name, direction, draw(small), shapes, draw(st.tuples(small, small)), draw(dtype)
                )
            )
    return tuple(made)


@settings(deadline=None)
@given(specs(), st.integers(1, 5))
def test_the_parts_of_all_layers_fill_the_envelope_without_overlap(
    chain: tuple[SubPoolSpec, ...], page_size: int
) -> None:
    for spec in chain:
        end = 0
        padding = 0
        for layer in range(spec.layer_num):
            for part in spec.layer_parts(layer, page_size):
                assert part.offset >= end
                assert part.offset % part.dtype.itemsize == 0
                padding += part.offset - end
                end = part.offset + part.nbytes
        envelope = spec.page_envelope_bytes(page_size)
        assert end <= envelope
        assert envelope == spec.slots_per_page(page_size) * spec.entry_bytes()
        if not isinstance(spec, MambaSubPoolSpec):
            assert (padding, end) == (0, envelope)


@settings(deadline=None, max_examples=40)
@given(specs(), st.integers(1, 3))
def test_writing_one_page_touches_its_own_bytes_only(chain: tuple[SubPoolSpec, ...], page_size: int) -> None:
    driver = HostVmm()
    floor = 16 * max(spec.page_envelope_bytes(page_size) for spec in chain)
    pool = UnifiedKVPool(
        total_bytes=floor * len(chain), sub_pool_specs=chain, driver=driver, page_size=page_size
    )
    for spec in pool.sub_pool_specs:
        envelope = pool.page_bytes(spec.name)
        page = pool.num_pages(spec.name) - 1
        pool.raw.zero_()
        written = 0
        for layer in range(spec.layer_num):
            for part in spec.layer_parts(layer, page_size):
                pool.view(spec.name, layer, part.name)[page].view(torch.uint8).fill_(1)
                written += part.nbytes
        assert int(pool.raw[page * envelope : (page + 1) * envelope].sum()) == written
        assert int(pool.raw.sum()) == written
    pool.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MHASubPoolSpec("", "up", 1, 1, 1, BF16), "name"),
        (lambda: MHASubPoolSpec("a", "left", 1, 1, 1, BF16), "grow_direction 'left'"),  # type: ignore[arg-type]
        (lambda: MHASubPoolSpec("a", "up", 0, 1, 1, BF16), "layer_num 0"),
        (lambda: MHASubPoolSpec("a", "up", 1, -1, 1, BF16), "head_num -1"),
        (lambda: MHASubPoolSpec("a", "up", 1, 1, 1.5, BF16), "head_dim 1.5"),  # type: ignore[arg-type]
        (lambda: MHASubPoolSpec("a", "up", 1, 1, 1, BF16, v_head_dim=0), "v_dim 0"),
        (lambda: MHASubPoolSpec("a", "up", True, 1, 1, BF16), "layer_num True"),
        (lambda: MHASubPoolSpec("a", "up", 1, 1, 1, "bf16"), "dtype 'bf16'"),  # type: ignore[arg-type]
        (lambda: MLASubPoolSpec("a", "up", 1, 0, 1, BF16), "kv_lora_rank 0"),
        (lambda: MambaSubPoolSpec("a", "up", 1, ((0, 2),), (1,), BF16), r"shape \(0, 2\)"),
        (lambda: MambaSubPoolSpec("a", "up", 1, ((1, 2),), (), BF16), r"shape \(\)"),
    ],
)
def test_bad_descriptions_are_refused_by_field(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_the_chain_is_up_floats_down() -> None:
    def spec(name: str, direction: Any) -> MHASubPoolSpec:
        return MHASubPoolSpec(name, direction, 1, 1, 1, BF16)

    chain = chain_order([spec("d", "down"), spec("f2", "float"), spec("u", "up"), spec("f1", "float")])
    assert [one.name for one in chain] == ["u", "f2", "f1", "d"]
    with pytest.raises(LayoutError, match="without sub-pools"):
        chain_order([])
    with pytest.raises(LayoutError, match="called a"):
        chain_order([spec("a", "up"), spec("a", "down")])
    with pytest.raises(LayoutError, match=r"a and b all grow up.*float"):
        chain_order([spec("a", "up"), spec("b", "up")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": True}, "page_size is True"),
        ({"bs1_floor_terms": [("other", 1)]}, r"'other'.*names are: a"),
        ({"bs1_floor_terms": [("a", -1)]}, "-1 slots"),
    ],
)
def test_pools_that_cannot_be_laid_out(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "total_bytes": 1 << 20,
        "sub_pool_specs": [MHASubPoolSpec("a", "up", 1, 1, 8, BF16)],
        "driver": HostVmm(),
    }
    with pytest.raises(LayoutError, match=message):
        UnifiedKVPool(**(arguments | change))


def test_names_pages_and_layers_that_are_not_there() -> None:
    pool = UnifiedKVPool(
        total_bytes=1 << 16, sub_pool_specs=[MHASubPoolSpec("a", "up", 2, 1, 8, BF16)], driver=HostVmm()
    )
    for ask in (
        lambda: pool.page_bytes("b"),
        lambda: pool.get_contiguous_buf_infos("b"),
        lambda: pool.k_view("b", 0),
    ):
        with pytest.raises(LayoutError, match=r"no sub-pool 'b'.*a"):
            ask()
    for layer in (-1, 2):
        with pytest.raises(LayoutError, match="layers 0 to 1"):
            pool.k_view("a", layer)
    for page in (-1, pool.reserved_num_pages("a")):
        with pytest.raises(LayoutError, match=f"no page {page}"):
            pool.page_address("a", page)
    pool.close()
