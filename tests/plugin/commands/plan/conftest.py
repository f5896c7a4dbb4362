from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvarena.errors import KvArenaError
from kvarena.plugin.commands.plan import command as plan
from kvarena.plugin.commands.plan.load import load_config
from kvarena.plugin.commands.plan.ranks import CacheDtypes, RankGeometry, rank_geometry
from kvarena.plugin.commands.plan.read import geometry_from_config

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Outcome:
    """What ``kvarena plan`` answered."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def config_file() -> Callable[[str], Path]:
    """The path of one of the published configurations."""
    return lambda name: DATA / "configs" / f"{name}.json"


@pytest.fixture
def config(config_file: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """A published configuration, with some top-level keys replaced."""

    def read(name: str, **changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(load_config(config_file(name))), **changes}

    return read


@pytest.fixture
def rank() -> Callable[..., RankGeometry]:
    """One rank's sub-pools of a configuration, in bf16 with fp32 states."""

    def build(config: dict[str, Any], tp: int = 1, **dtypes: str) -> RankGeometry:
        return rank_geometry(geometry_from_config(config), tp=tp, dtypes=CacheDtypes(**dtypes))

    return build


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Outcome]:
    """Run ``kvarena plan`` as the command does; a dict among the arguments becomes a config.json."""

    def run(*arguments: object) -> Outcome:
        texts = []
        for argument in arguments:
            if isinstance(argument, dict):
                file = tmp_path / "config.json"
                file.write_text(json.dumps(argument))
                argument = file
            texts.append(str(argument))
        parser = argparse.ArgumentParser(prog="kvarena")
        plan.add_parser(parser.add_subparsers())
        try:
            status = plan.run(parser.parse_args(["plan", *texts]))
        except KvArenaError as error:
            sys.stderr.write(f"kvarena plan: {error}\n")
            status = 2
        except SystemExit as stop:  # argparse
            status = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run
