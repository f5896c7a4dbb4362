"""The table of class defaults against the real transformers, and plans with it and without."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
CACHE = Path(os.environ.get("KVARENA_CONTRACT_CACHE") or Path(__file__).parents[4] / ".cache" / "contract")
FOLDERS = [CACHE / "transformers-5.19", CACHE / "requirements"]

needs_transformers = pytest.mark.skipif(
    not all(folder.is_dir() for folder in FOLDERS),
    reason="needs the real transformers of the contract cache: make contract",
)

#: Where the table and transformers 5.19 differ in words, not in sizes: the class computes the first from
#: the file's own sizes, and writes its one width out for each layer.
DIFFERENT = {
    ("bamba", "mamba_d_head"),
    ("falcon_h1", "mamba_d_head"),
    ("granitemoehybrid", "mamba_d_head"),
    ("gemma3n_text", "intermediate_size"),
}
#: Keys of published files that the classes of 5.19 turn into a schedule, or into values for each layer.
TURNED = {
    *("sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval"),
    *("max_window_layers", "full_attention_interval", "global_head_dim"),
}


COMPARE = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = json.loads(sys.argv[1])
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from kvarena.plugin.commands.plan import class_defaults, class_sizes
def values(name):
    return CONFIG_MAPPING[name]().to_dict()
unknown, different, compared = [], [], 0
tables = [(name, dict(table)) for name, table in class_defaults._DEFAULTS.items()]
tables += [(name, dict(class_sizes.class_sizes(name))) for name in class_sizes._SIZES]
tables += [(name, dict(class_defaults._DEFAULTS[like])) for name, like in class_defaults._LIKE.items()
           if name.endswith("_text")]
for name, table in tables:
    if name not in CONFIG_MAPPING:
        unknown.append(name)
        continue
    theirs = values(name)
    for key, value in table.items():
        compared += 1
        if theirs.get(key) != value:
            different.append([name, key, value, theirs.get(key, "absent")])
print(json.dumps({"unknown": unknown, "different": different, "compared": compared}))
"""

READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = json.loads(sys.argv[1])
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.plan.load import load_config
from kvarena.plugin.commands.plan.read import read_model
from kvarena.plugin.commands.plan.transformers_defaults import transformers_defaults
found = {}
for path in sys.argv[2:]:
    try:
        found[path] = repr(read_model(load_config(path)).geometry.layers)
    except KvArenaError as error:
        found[path] = str(error)
print(json.dumps([transformers_defaults("llama", {}) is not None, found]))
"""


def run(code: str, *arguments: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_transformers
def test_the_table_holds_what_transformers_says() -> None:
    found = run(COMPARE, json.dumps([str(folder) for folder in FOLDERS]))
    assert isinstance(found, dict)
    assert found["compared"] > 200
    assert found["unknown"] == []
    different = {
        (name, key): (ours, theirs)
        for name, key, ours, theirs in found["different"]
        if not (key in TURNED and theirs == "absent")
    }
    assert set(different) == DIFFERENT, different


@needs_transformers
def test_a_plan_is_the_same_with_transformers_and_without() -> None:
    paths = [str(path) for path in sorted((DATA / "configs").glob("*.json"))]
    asked, with_it = run(READ, json.dumps([str(folder) for folder in FOLDERS]), *paths)  # type: ignore[misc]
    assert asked is True
    alone, without = run(READ, "[]", *paths)  # type: ignore[misc]
    assert alone is (importlib.util.find_spec("transformers") is not None)
    assert with_it == without
