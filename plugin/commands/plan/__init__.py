"""Capacity planning: what a model keeps per token and per request, and how much of it a card holds.

`read.read_model` makes a `geometry.ModelGeometry` from a configuration, `ranks.rank_geometry` one
rank's sub-pools, `capacity.capacity` the tokens of a number of bytes, `planner.make_plan` a whole
plan, and `specs.pool_specs` the layouts that a pool is built from. Nothing here but `specs` imports
torch; the names are loaded from their modules.
"""

from __future__ import annotations

from kvarena.plugin.commands.plan.command import add_parser, run

__all__ = ["add_parser", "run"]
