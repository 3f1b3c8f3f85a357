"""Weights as Hugging Face keeps them: one safetensors file, or numbered ones with an index.

Knows how such files are read into a catalogue and laid out from tensors; refuses to know what the names mean, and which
tensors are worth it. The index and the files are held against each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.container import FileSet, Header, build_header, parse_json, read_header
from shardckpt.errors import CheckpointError, CheckpointNotFoundError, FormatError, UnsupportedError, listing
from shardckpt.manifest import is_safe_path
from shardckpt.region import whole
from shardckpt.storage import Store

WEIGHTS_PATH = "model.safetensors"
ADAPTER_WEIGHTS_PATH = "adapter_model.safetensors"
INDEX_PATH = "model.safetensors.index.json"
MAX_INDEX_NBYTES = 256 << 20

_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt)")
_NUMBERED = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with the files or their index.

    Attributes:
        path: The file.
        kind: "missing", "damaged" or "inconsistent".
        error: What a reader that needs it raises.
    """

    path: str
    kind: str
    error: CheckpointError


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that were found.

    Attributes:
        catalogue: Tensors by the names in the files, in the order of the files; aliases where a file records them.
        home: File of each tensor.
        unused: Further safetensors files of the folder, which the index does not name.
        faults: What is wrong; the catalogue is that of the sound files.
    """

    catalogue: Catalogue
    home: Mapping[str, str]
    unused: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    def sound(self) -> Weights:
        """Give them if nothing is wrong; raises what is wrong otherwise."""
        for fault in self.faults:
            raise fault.error
        return self


def looks_like_weights(paths: Iterable[str]) -> bool:
    """Tell whether a folder with these files is one of weights, usable or not."""
    return any(".safetensors" in path or _PICKLED.fullmatch(path) for path in paths)


def read_folder(store: Store) -> Weights:
    """Read the headers of the weights in a folder.

    Raises:
        CheckpointNotFoundError: If there are none, or a file that the index names is missing.
        FormatError: If files and index are damaged, or contradict each other.
        UnsupportedError: If there are pickled weights only.
    """
    return survey_folder(store).sound()


def read_files(store: Store, paths: Sequence[str]) -> Weights:
    """Read the headers of safetensors files into one catalogue.

    Raises:
        FormatError: If a file is damaged, or two hold tensors of one name.
    """
    return survey_files(store, paths).sound()


def survey_folder(store: Store) -> Weights:
    """Read the headers of the weights in a folder as far as they are sound, and give all that is wrong.

    Raises:
        CheckpointError: As `read_folder`, where it cannot be told which files are meant.
    """
    found = [path for path in store.list() if "/" not in path]
    files = [path for path in found if path.endswith(".safetensors")]
    indices = [path for path in found if path.endswith(".safetensors.index.json")]
    if len(indices) + (WEIGHTS_PATH in files) > 1:
        raise FormatError(
            f"{store.url!r} has {listing([*indices, *({WEIGHTS_PATH} & set(files))])}, which may hold different "
            "weights; name the file that is wanted, or remove the other"
        )
    if indices:
        return _survey_indexed(store, indices[0], files)
    wanted = WEIGHTS_PATH if WEIGHTS_PATH in files else files[0] if len(files) == 1 else None
    if wanted is not None:
        return replace(survey_files(store, [wanted]), unused=tuple(path for path in files if path != wanted))
    if files:
        raise FormatError(
            f"{store.url!r} has {listing(files)} but no index; name one of the files, or fetch {INDEX_PATH!r}"
        )
    if pickled := [path for path in found if _PICKLED.fullmatch(path)]:
        raise UnsupportedError(
            f"{store.url!r} has weights as pickles only ({listing(pickled)}), which can run any program when they are "
            "read; save the model again as safetensors"
        )
    there = f"it has {listing(found)}" if found else "nothing is there"
    raise CheckpointNotFoundError(f"there are no weights at {store.url!r}: {there}; check the path")


def survey_files(store: Store, paths: Sequence[str]) -> Weights:
    """Read the headers of those files that are sound, and give what is wrong with the others."""
    builder = CatalogueBuilder()
    aliases: dict[str, str] = {}
    tensors: list[Tensor] = []
    home: dict[str, str] = {}
    faults: list[Fault] = []
    for path in paths:
        try:
            with closing(store.open_reader(path)) as reader:
                header, nbytes = read_header(reader), reader.nbytes
        except CheckpointNotFoundError as error:
            faults.append(Fault(path, "missing", error))
            continue
        except FormatError as error:
            faults.append(Fault(path, "damaged", error))
            continue
        file = builder.add_file(File(path, nbytes, header.nbytes))
        for entry in sorted(header.entries, key=lambda entry: (entry.begin, entry.nbytes)):
            if entry.key in home:
                text = f"{entry.key!r} is in {home[entry.key]!r} and in {path!r}; the files are not of one model"
                faults.append(Fault(path, "inconsistent", FormatError(text)))
                continue
            home[entry.key] = path
            tensors.append(Tensor(entry.key, entry.dtype, entry.shape))
            builder.add_chunk(len(tensors) - 1, whole(entry.shape), file=file, byte_offset=entry.begin)
        aliases |= _recorded_aliases(header)
    others_of: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        if alias not in home:
            others_of.setdefault(name, []).append(alias)
    for tensor in tensors:
        builder.add_tensor(replace(tensor, aliases=tuple(others_of.get(tensor.name, ()))))
    return Weights(builder.build(), home, faults=tuple(faults))


def lay_out_folder(tensors: Sequence[Tensor], *, max_file_bytes: int | None) -> tuple[FileSet, bytes | None]:
    """Lay out the weights of a folder: one file, or several and their index.

    Args:
        tensors: In the order in which they are stored.
        max_file_bytes: No file holds more bytes of tensors, unless a single tensor does; None for one file.

    Returns:
        The files, and the index if there is more than one file.
    """
    groups = _split(tensors, max_file_bytes)
    if len(groups) == 1:
        return lay_out_files([(WEIGHTS_PATH, groups[0])]), None
    paths = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {tensor.name: path for path, group in zip(paths, groups, strict=True) for tensor in group},
    }
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    return lay_out_files(list(zip(paths, groups, strict=True))), text.encode()


def lay_out_files(groups: Sequence[tuple[str, Sequence[Tensor]]]) -> FileSet:
    """Lay out safetensors files of whole tensors: (path, tensors) each."""
    builder = CatalogueBuilder()
    headers = []
    for path, unordered in groups:
        tensors = sorted(unordered, key=lambda tensor: -tensor.item_bytes)  # so that all are aligned to their elements
        aliases = {alias: tensor.name for tensor in tensors for alias in tensor.aliases}
        rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        header, begins = build_header(rows, {"format": "pt"} | {a: n for a, n in aliases.items() if a != "format"})
        nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        file = builder.add_file(File(path, nbytes, len(header)))
        headers.append(header)
        for tensor, begin in zip(tensors, begins, strict=True):
            builder.add_chunk(builder.add_tensor(tensor), whole(tensor.shape), file=file, byte_offset=begin)
    return FileSet(builder.build(), tuple(headers))


def is_weights_path(path: str) -> bool:
    """Tell whether a file of a folder is one that this file lays out: weights or their index."""
    return path in (WEIGHTS_PATH, INDEX_PATH, ADAPTER_WEIGHTS_PATH) or _NUMBERED.fullmatch(path) is not None


def _survey_indexed(store: Store, index_path: str, files: Sequence[str]) -> Weights:
    try:
        weight_map = _weight_map(store, index_path)
    except FormatError as error:
        return replace(survey_files(store, files), faults=(Fault(index_path, "damaged", error),))
    paths = sorted(set(weight_map.values()))
    faults: list[Fault] = []
    if missing := [path for path in paths if path not in files]:
        text = f"{store.url!r} is incomplete: {index_path!r} names files that are not there: {listing(missing)}"
        absence = CheckpointNotFoundError(f"{text}; fetch them again")
        faults += [Fault(path, "missing", absence) for path in missing]
    weights = survey_files(store, [path for path in paths if path in files])
    faults += weights.faults
    faults += [Fault(index_path, "inconsistent", FormatError(text)) for text in _odds(index_path, weight_map, weights)]
    return replace(weights, unused=tuple(path for path in files if path not in paths), faults=tuple(faults))


def _odds(index_path: str, weight_map: Mapping[str, str], weights: Weights) -> Iterator[str]:
    """Give the contradictions of an index and those of its files that could be read."""
    home, read = weights.home, {file.path for file in weights.catalogue.files}
    if missing := [name for name, path in weight_map.items() if name not in home and path in read]:
        yield f"{index_path!r} names tensors that no file holds: {listing(missing)}; fetch the files again"
    if unnamed := [name for name in home if name not in weight_map]:
        yield (
            f"{index_path!r} does not name tensors that its files hold: {listing(unnamed)}; fetch it again, or import "
            "each file by its name"
        )
    if moved := [name for name in home if weight_map.get(name, home[name]) != home[name]]:
        yield (
            f"{index_path!r} says that {moved[0]!r} is in {weight_map[moved[0]]!r}, but it is in {home[moved[0]]!r} "
            f"({len(moved)} such tensors); index and files are of different saves"
        )


def _weight_map(store: Store, index_path: str) -> dict[str, str]:
    index = parse_json(store.get(index_path, max_nbytes=MAX_INDEX_NBYTES), index_path)
    match index:
        case {"weight_map": dict(weight_map)} if weight_map and all(isinstance(v, str) for v in weight_map.values()):
            if unsafe := [path for path in weight_map.values() if not is_safe_path(path) or "/" in path]:
                raise FormatError(f"{index_path!r} names files outside its folder: {listing(unsafe)}; do not trust it")
            return weight_map
    raise FormatError(f"{index_path!r} is no index: it has no 'weight_map' of names to files; fetch it again")


def _recorded_aliases(header: Header) -> dict[str, str]:
    """Give the further names that `safetensors.torch.save_model`, and this file, note in the metadata."""
    keys = {entry.key for entry in header.entries}
    return {
        alias: name
        for alias, name in header.metadata.items()
        if alias != "format" and name in keys and alias not in keys
    }


def _split(tensors: Sequence[Tensor], max_file_bytes: int | None) -> list[list[Tensor]]:
    """Cut a list of tensors into runs of at most so many bytes, or of one tensor."""
    groups: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and max_file_bytes is not None and held + tensor.nbytes > max_file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    return groups
