"""From a path to a configuration and, where the weights lie beside it, their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvarena.plugin.commands.plan.errors import PlanError

__all__ = ["load_config", "quantization_beside", "stored_weight_bytes"]

#: A published configuration is a few kilobytes; some quantized ones list every module.
_MAX_BYTES = 32 << 20


def load_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json``, given itself or its folder.

    A bare ``Infinity``, as some published files hold, is accepted where no size is read from it.

    Raises
    ------
    PlanError
        Nothing there, not readable, not JSON, or not an object.
    """
    if not str(path).strip():  # an unset variable in a script; Path would make it this folder
        raise PlanError("The path of the model is empty.", fix="Give a folder or a config.json.")
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
            if not file.is_file():
                raise PlanError(
                    f"{file.parent} has no config.json.",
                    fix="Give the folder of a Hugging Face model, or the file itself.",
                )
        with file.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise PlanError(
            f"{file} does not exist.",
            fix="Give a folder or a config.json on this machine; nothing is downloaded.",
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read: {error}.", fix="Give a readable config.json.") from error
    if len(raw) > _MAX_BYTES:
        raise PlanError(f"{file} is larger than {_MAX_BYTES >> 20} MiB.", fix="Give a config.json.")
    return parse_config(raw, name=str(file))


def parse_config(raw: bytes, *, name: str) -> dict[str, Any]:
    """The object that a file's bytes hold. Raises `PlanError`."""
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PlanError(f"{name} is not UTF-8 text: {error}.", fix="Give a config.json.") from error
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{name} is not JSON: {error}.", fix="Fetch the file again; it may be cut short."
        ) from error
    except RecursionError:
        raise PlanError(f"{name} is nested too deeply.", fix="Give a config.json.") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise PlanError(f"{name} holds a number that cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{name} holds no object but a {type(data).__name__}.", fix="Give a config.json.")
    return data


def quantization_beside(path: str | Path) -> dict[str, Any] | None:
    """What ``hf_quant_config.json`` says, where it lies beside a configuration.

    ModelOpt's older checkpoints keep their quantization, and their KV cache's, in a file of its own.

    Raises
    ------
    PlanError
        It is there, and cannot be read: what the cache is kept in would be a guess.
    """
    file = (Path(path) if Path(path).is_dir() else Path(path).parent) / "hf_quant_config.json"
    if not file.is_file():
        return None
    section = load_config(file).get("quantization")
    return section if isinstance(section, dict) else None


def stored_weight_bytes(path: str | Path) -> tuple[int, str] | None:
    """Bytes of the safetensors that lie beside a configuration, and where they were read.

    The headers of the files come first: they say what each tensor takes, even of a file that is cut
    short. Where not all files of the index were fetched, its own total is taken. A second copy of the
    weights under another name (``consolidated.safetensors``) is not counted.

    Returns
    -------
    tuple of (int, str) or None
        ``None`` where there are no weights.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file() and index.stat().st_size <= _MAX_BYTES:
            data = json.loads(index.read_bytes())
            listed = {name for name in data.get("weight_map", {}).values() if isinstance(name, str)}
            files = [folder / name for name in sorted(listed) if Path(name).name == name]
            if files and len(files) == len(listed) and all(file.is_file() for file in files):
                return sum(map(_tensor_bytes, files)), "the headers of its safetensors"
            total = data.get("metadata", {}).get("total_size")
            if isinstance(total, (int, float)) and not isinstance(total, bool) and 0 < total < 1 << 60:
                return int(total), "the index of its safetensors"
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        return (sum(map(_tensor_bytes, files)), "the headers of its safetensors") if files else None
    except (OSError, ValueError, AttributeError, RecursionError):
        # A hint only: a broken index is no reason to refuse what the configuration itself answers.
        return None


def _tensor_bytes(file: Path) -> int:
    """Bytes of the tensors of one safetensors file, from its header; of the file, where it has none."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_BYTES * 4):
            return size
        header = json.loads(stream.read(length))
    ends = [
        record["data_offsets"][1]
        for name, record in header.items()
        if name != "__metadata__" and isinstance(record, dict)
    ]
    total = max(ends, default=0)
    if not isinstance(total, int) or not 0 <= total < 1 << 60:
        raise ValueError(f"{file} has offsets that no file has")
    return total
