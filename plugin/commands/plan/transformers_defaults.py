"""What transformers says of a model class's defaults, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["transformers_defaults"]


def transformers_defaults(model_type: str, stated: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Every value that a model's configuration class has for what a file leaves out.

    The class is made from the file's own keys, as an engine makes it, so that what it derives from them
    (a schedule of layers, a head size) is derived from these and not from its own default model. Where
    it refuses them, its default model answers.

    Parameters
    ----------
    model_type : str
        As in the file.
    stated : Mapping
        The file's own keys.

    Returns
    -------
    Mapping or None
        ``None`` where transformers is not installed, cannot be imported, or does not know the class.
    """
    if not model_type or importlib.util.find_spec("transformers") is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("transformers").logging.set_verbosity_error()
            classes = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
            if model_type not in classes:
                return None
            kind = classes[model_type]
            try:
                values = kind.from_dict(dict(stated)).to_dict()
            except Exception:  # noqa: BLE001 - a file that the class refuses is judged here, key by key
                values = kind().to_dict()
    except Exception:  # noqa: BLE001 - a broken installation is no reason against a plan: the table answers
        return None
    return {key: value for key, value in values.items() if key not in stated}
