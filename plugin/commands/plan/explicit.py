"""A geometry given by numbers, for models whose files say nothing that can be read."""

from __future__ import annotations

from dataclasses import dataclass

from kvarena.plugin.commands.plan.errors import PlanError
from kvarena.plugin.commands.plan.geometry import KVRow, LayerCache, MLARow, ModelGeometry, Span, StateShape

__all__ = ["GeometryOptions"]


@dataclass(frozen=True, slots=True)
class GeometryOptions:
    """Layers by kind and what each keeps; sizes are of the whole model, before it is split.

    A state is given by its elements, all in the temporal dtype, and is split evenly over ranks.
    """

    full_layers: int = 0
    window_layers: int = 0
    window: int | None = None
    state_layers: int = 0
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    window_kv_heads: int | None = None
    window_head_dim: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    state_elements: int | None = None

    @property
    def given(self) -> bool:
        return bool(self.full_layers or self.window_layers or self.state_layers)

    def geometry(self) -> ModelGeometry:
        """The model's geometry.

        Raises
        ------
        PlanError
            An option that is missing, or one that this geometry has no use for.
        """
        self._refuse_unused()
        layers: list[LayerCache] = []
        if self.full_layers:
            layers += [LayerCache(row=self._row())] * self.full_layers
        if self.window_layers:
            row = self._row()
            if isinstance(row, KVRow) and (self.window_kv_heads or self.window_head_dim):
                head_dim = self.window_head_dim or row.head_dim
                row = KVRow(
                    self.window_kv_heads or row.kv_heads, head_dim, self.window_head_dim or row.v_head_dim
                )
            window = self._need("window", self.window)
            layers += [LayerCache(row=row, span=Span.SLIDING, window=window)] * self.window_layers
        if self.state_layers:
            elements = self._need("state-elements", self.state_elements)
            state = StateShape("given", 0, 0, 0, 0, heads=elements, head_elements=1)
            layers += [LayerCache(state=state)] * self.state_layers
        return ModelGeometry("given by options", tuple(layers))

    def _refuse_unused(self) -> None:
        latent = self.kv_lora_rank is not None
        no_window_heads = (latent or not self.window_layers) and "there are no --window-layers with heads"
        unused = {
            "window": not self.window_layers and "there are no --window-layers",
            "window_kv_heads": no_window_heads,
            "window_head_dim": no_window_heads,
            "state_elements": not self.state_layers and "there are no --state-layers",
            "kv_heads": latent and "--kv-lora-rank makes rows of a latent",
            "head_dim": latent and "--kv-lora-rank makes rows of a latent",
            "v_head_dim": latent and "--kv-lora-rank makes rows of a latent",
            "qk_rope_head_dim": not latent and "there is no --kv-lora-rank",
        }
        for name, why in unused.items():
            if why and getattr(self, name) is not None:
                option = "--" + name.replace("_", "-")
                raise PlanError(f"{option} says nothing here: {why}.", fix="Leave one of the two out.")

    def _row(self) -> KVRow | MLARow:
        if self.kv_lora_rank is not None:
            return MLARow(self.kv_lora_rank, self._need("qk-rope-head-dim", self.qk_rope_head_dim))
        head_dim = self._need("head-dim", self.head_dim)
        return KVRow(self._need("kv-heads", self.kv_heads), head_dim, self.v_head_dim or head_dim)

    @staticmethod
    def _need(option: str, value: int | None) -> int:
        if value is None:
            raise PlanError(f"--{option} is missing for this geometry.", fix=f"Give --{option}.")
        return value
