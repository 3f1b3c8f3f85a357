"""Whether weights are those of the model that a config describes, as transformers itself says.

Its loader is given tensors without memory, so that it says what it would make of the real ones: which names it expects
differs by model, and it takes older names too. Knows nothing of models itself. transformers, and accelerate, which it
needs for that, are optional.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.catalogue import Tensor
from shardckpt.container import parse_json
from shardckpt.tools.companions import CONFIG_PATH


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What would become of weights that are loaded.

    Attributes:
        missing: Names that the model has, and would fill with new values.
        unexpected: Names that it does not have.
        reshaped: Names and shapes, where they differ, in words.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()


def report_of_loading(config: bytes, tensors: Sequence[Tensor]) -> LoadReport | str:
    """Give what transformers would make of tensors of these names and shapes, or why it cannot be asked.

    Raises:
        FormatError: If the config is no JSON.
    """
    fields = parse_json(config, CONFIG_PATH)
    try:
        import torch  # on demand: commands are quick without
        import transformers
    except ImportError as error:
        return f"{error}; install shardckpt[hf]"
    match fields:
        case {"architectures": [str(name), *_], **others} if "auto_map" not in others:
            pass
        case _:
            return f"{CONFIG_PATH!r} names no architecture, or one that takes code of its own"
    with _silence(transformers):
        try:
            architecture = getattr(transformers, name)
            parsed = architecture.config_class.from_dict(fields)
            weights = {tensor.name: torch.empty(tensor.shape, device="meta") for tensor in tensors}
            options = {"ignore_mismatched_sizes": True, "output_loading_info": True, "device_map": {"": "meta"}}
            _, found = architecture.from_pretrained(None, config=parsed, state_dict=weights, **options)
        except Exception as error:  # whatever a model of any kind, or its absence, may raise
            return f"transformers cannot tell ({type(error).__name__}: {error})"
    return LoadReport(
        tuple(sorted(found["missing_keys"])),
        tuple(sorted(found["unexpected_keys"])),
        tuple(f"{name} {tuple(has)} instead of {tuple(want)}" for name, has, want in sorted(found["mismatched_keys"])),
    )


@contextlib.contextmanager
def _silence(transformers: Any) -> Iterator[None]:
    """Keep it from printing bars and reports of its own."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
