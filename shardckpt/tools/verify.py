"""Survey a checkpoint, or weights in safetensors files: all that can be told without reading data.

Manifest, chunk table, index, headers, sizes, coverage, and names of tied tensors. Does not stop at the first problem;
`soundness` reads the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from shardckpt.catalogue import Catalogue, File, Tensor
from shardckpt.committed import read_committed
from shardckpt.container import parse_json
from shardckpt.errors import CheckpointNotFoundError, CoverageError, FormatError
from shardckpt.formats.huggingface import survey_files, survey_folder
from shardckpt.formats.origin import Place
from shardckpt.manifest import MANIFEST_PATH, MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from shardckpt.plan import prove_coverage
from shardckpt.storage import Store
from shardckpt.tools.companions import CONFIG_PATH, MAX_COMPANION_NBYTES
from shardckpt.tools.segments import segments_of, untiled_files
from shardckpt.tools.soundness import Problem, Survey, names_of

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "shared.weight", "word_embeddings.weight")
"""How models of transformers call what `tie_word_embeddings` in a config makes one tensor."""


def survey(store: Store) -> Survey:
    """Check manifest, chunk table, sizes of files, and that the chunks of every tensor tile it.

    Raises:
        CheckpointNotFoundError: If nothing is committed there.
        StorageError: If something cannot be read.
    """
    try:
        catalogue = read_committed(store).catalogue
        table_problems: list[Problem] = []
        manifest = _read_manifest(store)
    except (FormatError, CheckpointNotFoundError) as error:
        if not store.exists(MANIFEST_PATH):
            raise
        try:
            manifest = _read_manifest(store)
        except FormatError as manifest_error:
            problem = Problem(MANIFEST_PATH, "damaged", str(manifest_error))
            return Survey(store, Catalogue((), ()), (problem,), (), segments_of(Catalogue((), ())))
        kind = "missing" if isinstance(error, CheckpointNotFoundError) else "damaged"
        table_problems = [Problem(manifest.chunk_table.path, kind, str(error))]
        catalogue = _without_chunks(manifest)
    return _survey(store, manifest, catalogue, table_problems)


def survey_weights(place: Place) -> Survey:
    """Check index, headers and sizes of safetensors files, and find the tensors that a config says to be tied.

    Raises:
        CheckpointError: If it cannot be told which files are meant, or something cannot be read.
    """
    store = place.store
    weights = survey_folder(store) if place.file is None else survey_files(store, [place.file])
    catalogue = weights.catalogue
    problems = [Problem(fault.path, fault.kind, str(fault.error)) for fault in weights.faults]
    if not catalogue.tensors and not problems:
        problems.append(Problem(place.file or "", "incomplete", "there are no tensors"))
    ties: tuple[tuple[str, int, int], ...] = ()
    if place.file is None and store.exists(CONFIG_PATH):
        try:
            config = parse_json(store.get(CONFIG_PATH, max_nbytes=MAX_COMPANION_NBYTES), CONFIG_PATH)
        except FormatError as error:
            problems.append(Problem(CONFIG_PATH, "damaged", str(error)))
        else:
            ties = tuple(_ties(config, catalogue))
    return Survey(store, catalogue, tuple(problems), weights.unused, segments_of(catalogue), ties)


def _ties(config: object, catalogue: Catalogue) -> Iterator[tuple[str, int, int]]:
    """Give the chunks of output heads and embeddings that are stored both, where the config says that they are one."""
    match config:
        case {"tie_word_embeddings": True}:
            of_last = [(t.name.rpartition(".")[0].rpartition(".")[2] + ".weight", t) for t in catalogue.tensors]
            heads = [t for last, t in of_last if last == _HEAD]
            tied = [(head, t) for head in heads for last, t in of_last if last in _EMBEDDINGS and t.shape == head.shape]
            chunk = {int(tensor): number for number, tensor in enumerate(catalogue.chunk_tensor.tolist())}
            for head, embedding in tied:
                one, other = catalogue.by_name[head.name], catalogue.by_name[embedding.name]
                if one in chunk and other in chunk:
                    yield CONFIG_PATH, chunk[one], chunk[other]


def _survey(store: Store, manifest: Manifest, catalogue: Catalogue, problems: list[Problem]) -> Survey:
    listed = store.list()
    found = {file.path: _size(store, file.path, listed) for file in catalogue.files}
    has_table = not problems
    segments = segments_of(catalogue)
    untiled = untiled_files(catalogue, segments) if has_table else []
    for number, file in enumerate(catalogue.files):
        problems += _size_problems(catalogue, number, found[file.path])
        if number in untiled:
            problems.append(Problem(file.path, "malformed", f"the chunk table does not tile the {file.nbytes} bytes"))
    if has_table:
        problems += _coverage_problems(catalogue)
    sizes = np.array([size or 0 for size in found.values()], np.int64)
    is_there = segments.byte_offset + segments.nbytes <= sizes[segments.file] if len(sizes) else segments.file < 0
    named = {MANIFEST_PATH, manifest.chunk_table.path, *found}
    extra = tuple(path for path in listed if path not in named)
    return Survey(store, catalogue, tuple(problems), extra, segments.take(is_there & ~np.isin(segments.file, untiled)))


def _size_problems(catalogue: Catalogue, number: int, found: int | None) -> list[Problem]:
    file = catalogue.files[number]
    if found == file.nbytes:
        return []
    is_in_file = catalogue.chunk_file == number
    if found is None:
        text = f"it is missing; {file.nbytes} bytes were written"
        return [Problem(file.path, "missing", text, names_of(catalogue, np.flatnonzero(is_in_file)))]
    is_hurt = is_in_file & (catalogue.chunk_byte_offset + catalogue.chunk_nbytes > found)
    state = "truncated" if found < file.nbytes else "longer than it was"
    text = f"it is {state}: expected {file.nbytes} bytes, found {found}"
    return [Problem(file.path, "size", text, names_of(catalogue, np.flatnonzero(is_hurt)))]


def _coverage_problems(catalogue: Catalogue) -> list[Problem]:
    """Give the tensors that the chunks do not tile; each alone only if there are any."""

    def attempt(part: Catalogue) -> str | None:
        try:
            prove_coverage(part)
        except CoverageError as error:
            return str(error)
        return None

    if attempt(catalogue) is None:
        return []
    alone = ((t.name, attempt(catalogue.select([t.name]))) for t in catalogue.tensors)
    return [Problem("", "incomplete", text, (name,)) for name, text in alone if text is not None]


def _read_manifest(store: Store) -> Manifest:
    return decode_manifest(store.get(MANIFEST_PATH, max_nbytes=MAX_MANIFEST_NBYTES), f"{store.url}/{MANIFEST_PATH}")


def _without_chunks(manifest: Manifest) -> Catalogue:
    files = tuple(File(f.path, f.nbytes, f.header_nbytes, int(f.crc32c, 16)) for f in manifest.files)
    tensors = tuple(Tensor(t.name, t.dtype, tuple(t.shape), tuple(t.aliases)) for t in manifest.tensors)
    return Catalogue(tensors, files)


def _size(store: Store, path: str, listed: dict[str, int]) -> int | None:
    if path in listed:
        return listed[path]
    try:
        with closing(store.open_reader(path)) as reader:  # a list may lag behind
            return reader.nbytes
    except (CheckpointNotFoundError, FormatError):  # or something that is no file
        return None
