"""Turn weights in safetensors files into a checkpoint, as the runtime would have saved a module that holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardckpt import names
from shardckpt.committed import Draft
from shardckpt.container import parse_json
from shardckpt.errors import MismatchError
from shardckpt.formats.huggingface import ADAPTER_WEIGHTS_PATH, read_files, read_folder
from shardckpt.layout import regions, single_bucket
from shardckpt.manifest import Json
from shardckpt.storage import Store
from shardckpt.tools.companions import ADAPTER_CONFIG_PATH, ADAPTER_SECTION, MAX_COMPANION_NBYTES
from shardckpt.tools.rewrite import Rewrite, plan_rewrite

SECTION = "model"


@dataclass(frozen=True, slots=True)
class ImportJob:
    """An import that is worked out but not begun.

    Attributes:
        rewrite: What will be written.
        unused: Safetensors files of the folder that were left alone.
    """

    rewrite: Rewrite
    unused: tuple[str, ...]


def plan_import(source: Store, *, num_ranks: int, file: str | None = None) -> ImportJob:
    """Work out the checkpoint of a Hugging Face folder, or of one file in it.

    Args:
        source: The folder.
        num_ranks: World size of the checkpoint.
        file: The safetensors file to take; None to take what the folder's index says.

    The config of LoRA adapters comes in beside them, as the section "adapter_config", so that an export has it.

    Raises:
        CheckpointError: As `read_folder`.
        MismatchError: If there are no tensors.
    """
    found = read_folder(source) if file is None else read_files(source, [file])
    if not found.catalogue.tensors:
        raise MismatchError(f"{source.url!r} holds no tensors; check the path")

    def named(name: str) -> str:
        return names.plain((SECTION, name))

    tensors = tuple(
        replace(tensor, name=named(tensor.name), aliases=tuple(named(alias) for alias in tensor.aliases))
        for tensor in found.catalogue.tensors
    )
    layout = single_bucket(tensors)
    sections: dict[str, str] = {SECTION: "module"}
    objects: dict[str, Json] = {SECTION: {}}
    if [kept.path for kept in found.catalogue.files] == [ADAPTER_WEIGHTS_PATH] and source.exists(ADAPTER_CONFIG_PATH):
        sections[ADAPTER_SECTION] = "value"
        objects[ADAPTER_SECTION] = _text(source, ADAPTER_CONFIG_PATH)
    draft = Draft(None, num_ranks, sections, tensors, layout, objects)
    renamed = {new.name: old.name for new, old in zip(tensors, found.catalogue.tensors, strict=True)}
    chunks = regions(layout, tensors, num_ranks)
    return ImportJob(plan_rewrite(found.catalogue, source, draft, chunks, renamed), found.unused)


def _text(source: Store, path: str) -> str:
    """Give a file of JSON as it is, to the character."""
    data = source.get(path, max_nbytes=MAX_COMPANION_NBYTES)
    parse_json(data, path)
    return data.decode()
