"""Whether tensors are those of a model: by the weights of another folder of it, or by its config alone.

Knows how missing, unexpected and reshaped tensors are told, and which of a tensor's names the model has.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.catalogue import Catalogue
from shardckpt.errors import CheckpointError, MismatchError, listing
from shardckpt.formats.huggingface import read_folder
from shardckpt.storage import Store
from shardckpt.tools.architecture import report_of_loading
from shardckpt.tools.selection import Selection, fanned_out


def expected_of(like: Store) -> Catalogue | str:
    """Give the names and shapes of the weights in a folder, or why there are none to go by."""
    try:
        return read_folder(like).catalogue
    except CheckpointError as error:
        return str(error)


def fitted(selection: Selection, expected: Catalogue) -> Selection:
    """Give each tensor the name, or the names, that the expected model has for it.

    Raises:
        MismatchError: If names are missing or left over, or shapes differ; names all of them.
    """
    shapes = {tensor.name: tensor.shape for tensor in expected.tensors}
    names_of = {
        tensor.name: [name for name in (tensor.name, *tensor.aliases) if name in shapes] for tensor in selection.tensors
    }
    reshaped = [
        f"{name} {tensor.shape} instead of {shapes[name]}"
        for tensor in selection.tensors
        for name in names_of[tensor.name]
        if shapes[name] != tensor.shape
    ]
    found = {name for names in names_of.values() for name in names}
    _refuse(
        missing=[name for name in shapes if name not in found],
        unexpected=[name for name, names in names_of.items() if not names],
        reshaped=reshaped,
        advice="Name the folder of the same model, or only its config.json if the weights there are of another one.",
    )
    return fanned_out(selection, lambda tensor: names_of[tensor.name])


def fitted_by_config(selection: Selection, config: bytes) -> tuple[Selection, str]:
    """Give each tensor, besides its name, the further ones that the model of this config has for it.

    Returns:
        The selection, and why it could not be compared with the model, or "".

    Raises:
        MismatchError: If names are missing or left over, or shapes differ; names all of them.
    """
    report = report_of_loading(config, selection.tensors)
    if isinstance(report, str):
        return selection, report
    aliases = {alias for tensor in selection.tensors for alias in tensor.aliases}
    _refuse(
        missing=[name for name in report.missing if name not in aliases],
        unexpected=report.unexpected,
        reshaped=report.reshaped,
        advice="Give the config of this training; --rules renames, and --skip leaves out.",
    )
    wanted = set(report.missing)
    return fanned_out(selection, lambda tensor: [tensor.name, *(a for a in tensor.aliases if a in wanted)]), ""


def _refuse(*, missing: Sequence[str], unexpected: Sequence[str], reshaped: Sequence[str], advice: str) -> None:
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    if wrong := [f"{what} {listing(items)}" for what, items in kinds if items]:
        raise MismatchError(f"the checkpoint does not fit the model: {'; '.join(wrong)}. {advice}")
