"""What a recurrent layer keeps per request: a convolution's window and a state."""

from __future__ import annotations

from kvarena.plugin.commands.plan.fields import Fields
from kvarena.plugin.commands.plan.geometry import StateShape
from kvarena.plugin.commands.plan.kinds import HEAD_KEYS
from kvarena.plugin.commands.plan.rows import HIDDEN_KEYS

__all__ = ["state_dtype", "state_shape"]

_STATE_SIZE = ("mamba_d_state", "ssm_state_size", "state_size")
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_KERNEL = ("mamba_d_conv", "conv_kernel")
_EXPAND = ("mamba_expand", "expand")


def state_dtype(fields: Fields) -> str | None:
    """The dtype in which the file wants its recurrent state, if it says so."""
    return fields.text("mamba_ssm_cache_dtype") or fields.text("mamba_ssm_dtype")


def state_shape(fields: Fields, mixer: str) -> StateShape:
    """The state of a layer.

    Parameters
    ----------
    mixer : str
        What the layer kinds call it: ``mamba``, ``linear``, ``conv`` or ``recurrent``.

    Raises
    ------
    ModelConfigError
        A size that the mixer needs is missing or cannot be.
    """
    return {"mamba": _mamba, "linear": _linear, "conv": _short_conv, "recurrent": _rg_lru}[mixer](fields)


def _mamba(fields: Fields) -> StateShape:
    pure = fields.model_type == "mamba2"
    heads = fields.count(*_MAMBA_HEADS, *(("num_heads",) if pure else ()))
    state = fields.need(*_STATE_SIZE, why="some layers keep a Mamba state")
    taps = fields.need(*_KERNEL, why="some layers keep a Mamba state") - 1
    if heads is None or fields.model_type == "zamba":
        if pure:
            heads = fields.need("num_heads", why="Mamba 2 has heads")
        else:
            inner = _inner(fields)
            return StateShape("mamba1", inner, 0, 0, taps, heads=inner, head_elements=state)
    head_dim = _mamba_head_dim(fields, heads, pure)
    heads = _checked_heads(fields, heads, head_dim)
    groups = fields.count("mamba_n_groups", "mamba_ngroups", "n_groups")
    if groups is None:
        groups = 1
        fields.note("No number of Mamba groups in the file: 1.")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"is {groups}, which does not divide the {heads} Mamba heads")
    inner = heads * head_dim
    return StateShape("mamba2", inner, groups, 2 * state, taps, heads=heads, head_elements=head_dim * state)


def _inner(fields: Fields) -> int:
    """Inner channels, from the hidden size where they are not given."""
    stated = fields.count("mamba_d_ssm")
    if stated is not None:
        return stated
    if fields.model_type in ("mamba", "falcon_mamba") and (inner := fields.count("intermediate_size")):
        return inner
    expand = fields.need(*_EXPAND, why="it makes the Mamba channels from the hidden size")
    return expand * fields.need(*HIDDEN_KEYS)


def _mamba_head_dim(fields: Fields, heads: int, pure: bool) -> int:
    keys = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", *(("head_dim",) if pure else ()))
    stated = [key for key in keys if key in fields or fields.has_default(key)]
    key = stated[0] if stated else keys[0]
    value = fields.raw(key)
    if value is None or value == "auto":
        inner = _inner(fields)
        if inner % heads:
            raise fields.error(key, f"is not given, and {inner} channels are not divided by {heads} heads")
        return inner // heads
    head_dim = fields.whole(key, value)
    if fields.stated("mamba_d_ssm") and heads * head_dim != (inner := _inner(fields)):
        raise fields.error(
            "mamba_d_ssm", f"is {inner}, but {heads} heads of {head_dim} make {heads * head_dim}"
        )
    return head_dim


#: Classes that refuse heads x head dim other than expand x hidden size (transformers 5.19).
_INNER_IS_EXPANDED = ("bamba", "granitemoehybrid", "mamba2", "zamba2")


def _checked_heads(fields: Fields, heads: int, head_dim: int) -> int:
    """Heads that make the inner channels; a default beside stated sizes is no answer where it does not."""
    if fields.model_type not in _INNER_IS_EXPANDED or heads * head_dim == (inner := _inner(fields)):
        return heads
    key = next((name for name in _MAMBA_HEADS if name in fields), None)
    if key is None and fields.model_type == "zamba2" and inner % head_dim == 0:
        # Its first files leave the heads out, and its first class derived them.
        fields.note(
            f"No number of Mamba heads in the file: {inner // head_dim}, which make {inner} channels."
        )
        return inner // head_dim
    stated = "" if key is not None else " (the class's default)"
    raise fields.error(
        key or _MAMBA_HEADS[0],
        f"is {heads}{stated}: {heads} heads of {head_dim} (mamba_d_head) make {heads * head_dim} channels, "
        f"but {fields.name('mamba_expand')} x {fields.name('hidden_size')} is {inner}",
        fix=f"Correct {fields.name('mamba_d_head')}, or give the {inner // head_dim} heads.",
    )


def _linear(fields: Fields) -> StateShape:
    kda = fields.block("linear_attn_config")
    if kda is not None:
        taps = kda.need("short_conv_kernel_size", why="KDA layers have a convolution") - 1
        return _kda(kda.need("num_heads"), kda.need("head_dim"), taps)
    if fields.stated("linear_num_heads"):  # Kimi Linear, as transformers writes it
        taps = fields.need("linear_conv_kernel_dim", why="KDA layers have a convolution") - 1
        return _kda(fields.need("linear_num_heads"), fields.need("linear_head_dim"), taps)
    if fields.stated("linear_num_value_heads") or fields.has_default("linear_num_value_heads"):
        return _delta_net(fields)
    if fields.stated("mixer_types"):  # MiniCPM's hybrids
        heads = fields.count("lightning_nkv", "lightning_nh") or fields.need(*HEAD_KEYS)
        head_dim = fields.count("lightning_head_dim", "head_dim") or fields.need(*HIDDEN_KEYS) // heads
        return StateShape("lightning", 0, 0, 0, 0, heads=heads, head_elements=head_dim * head_dim)
    if fields.stated("layer_group_size") or fields.stated("attn_type_list") or _is_minimax(fields):
        heads = fields.need(*HEAD_KEYS, why="lightning attention keeps a state per head")
        head_dim = fields.count("head_dim") or fields.need(*HIDDEN_KEYS) // heads
        kernel = fields.count("short_conv_kernel_size")
        if kernel is not None:
            return _kda(heads, head_dim, kernel - 1)
        return StateShape("lightning", 0, 0, 0, 0, heads=heads, head_elements=head_dim * head_dim)
    raise fields.error(
        "linear_num_value_heads",
        "is missing, and some layers are linear attention: their state cannot be known",
        fix="Add the linear_* keys, or give the geometry by options.",
    )


def _is_minimax(fields: Fields) -> bool:
    return fields.model_type.startswith("minimax")


def _kda(heads: int, head_dim: int, taps: int) -> StateShape:
    """Kimi delta attention: query, key and value are convolved, the state is a square per head."""
    width = heads * head_dim
    return StateShape("kda", width, heads, 2 * head_dim, taps, heads=heads, head_elements=head_dim * head_dim)


def _delta_net(fields: Fields) -> StateShape:
    why = "some layers are a gated delta net"
    value_heads = fields.need("linear_num_value_heads", why=why)
    value_dim = fields.need("linear_value_head_dim", why=why)
    key_heads = fields.need("linear_num_key_heads", why=why)
    key_dim = fields.need("linear_key_head_dim", why=why)
    taps = fields.need("linear_conv_kernel_dim", why=why) - 1
    if value_heads % key_heads:
        raise fields.error(
            "linear_num_key_heads", f"is {key_heads}, which does not divide the {value_heads} value heads"
        )
    return StateShape(
        "gated delta net",
        value_heads * value_dim,
        key_heads,
        2 * key_dim,
        taps,
        heads=value_heads,
        head_elements=value_dim * key_dim,
    )


def _short_conv(fields: Fields) -> StateShape:
    """LFM2's gated short convolution: no state but the window."""
    taps = fields.need("conv_L_cache", why="some layers are short convolutions") - 1
    return StateShape("short conv", fields.need(*HIDDEN_KEYS), 0, 0, taps, heads=0, head_elements=0)


def _rg_lru(fields: Fields) -> StateShape:
    """Recurrent Gemma's linear recurrence: one number per channel."""
    width = fields.count("lru_width") or fields.need(*HIDDEN_KEYS)
    taps = fields.need("conv1d_width", why="some layers are recurrent blocks") - 1
    return StateShape("rg-lru", width, 0, 0, taps, heads=width, head_elements=1)
