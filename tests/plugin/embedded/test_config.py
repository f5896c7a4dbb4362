"""Sizes that cannot work are refused by name, and those that can add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvarena.plugin.config import ConfigError, Settings
from kvarena.plugin.engines.embedded.config import EngineConfig, ModelConfig, SettingError
from kvarena.plugin.engines.embedded.engine import Engine, make_model, sub_pool_specs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_num", 1),
        ("layer_num", 0),
        ("head_num", 3),
        ("head_dim", 7),
        ("full_kv_head_num", 0),
        ("window_kv_head_num", 3),
        ("window", 0),
        ("window", -1),
        ("seed", -1),
        ("hidden_size", 0),
    ],
)
def test_model_sizes(field: str, value: int) -> None:
    with pytest.raises(SettingError, match=str(value)):
        ModelConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("chunk_pages", 0),
        ("chunk_pages", 129),
        ("context_length", 1),
        ("transfer_pages", 0),
        ("batch_sizes", ()),
        ("batch_sizes", (2, 1)),
        ("batch_sizes", (0, 1)),
        ("reserved_bytes", 0),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "cuda:-1"),
    ],
)
def test_engine_sizes(field: str, value: object) -> None:
    with pytest.raises(SettingError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("there", "wanted"), [(0, "cuda"), (0, "cuda:1"), (1, "cuda:1"), (2, "cuda:7")])
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, there: int, wanted: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(SettingError, match=wanted) as refused:
        make_model(EngineConfig(device=wanted))
    assert ("Give --device cpu." if there == 0 else f"cuda:{there - 1} or less") in str(refused.value)


def test_the_index_of_a_gpu_is_nothing_to_the_planners() -> None:
    config = EngineConfig(device="cuda:1")
    assert config.on_gpu
    assert config.sizing_request(driver="cuda", transfer_backend=None).device == "cuda"


@pytest.mark.parametrize("layer_num", [2, 5, 6])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_layouts(layer_num: int, kv_dtype: str) -> None:
    config = EngineConfig(model=ModelConfig(layer_num=layer_num, kv_dtype=kv_dtype))  # type: ignore[arg-type]
    specs = sub_pool_specs(config)
    assert tuple(spec.page_envelope_bytes(config.page_size) for spec in specs) == config.page_bytes()
    assert sum(spec.layer_num for spec in specs) == layer_num


@pytest.mark.parametrize("window", [1, 4, 5, 12, 33])
def test_pages_that_the_window_can_see(window: int) -> None:
    config = EngineConfig(model=ModelConfig(window=window), page_size=4)
    for position in range(200):
        seen = {at // 4 for at in range(max(0, position - window + 1), position + 1)}
        assert config.first_window_page(position) == min(seen)
        assert len(seen) <= config.window_pages


@pytest.mark.parametrize(("limit", "step"), [("memory_limit", 4096), ("pool_bytes", 1)])
def test_a_limit_below_the_floor_names_the_least_that_works(
    make_engine: Callable[..., Engine], small: EngineConfig, limit: str, step: int
) -> None:
    """Memory comes in units of the driver's granularity."""
    with pytest.raises(SettingError, match=f"raise KVARENA_{limit.upper()}") as refused:
        make_engine(**{limit: 4096})
    minimum = int(str(refused.value).split("The least that works is ")[1].split()[0])

    assert make_engine(**{limit: minimum}).book.capacity_tokens() >= small.chunk
    with pytest.raises(SettingError, match=f"The least that works is {minimum} bytes"):
        make_engine(**{limit: minimum - step})


def test_an_unknown_transfer_engine_is_named(small: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        Engine(small, Settings(transfer=("pigeon",), memory_limit=1 << 20, load_plugins=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(small: EngineConfig) -> None:
    with pytest.raises(SettingError, match="no CUDA device"):
        Engine(small.evolve(device="cuda"), Settings(load_plugins=False))
