"""Write the weights of a checkpoint as a Hugging Face folder, the files beside the weights included."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import msgspec

from shardckpt.catalogue import Catalogue, Tensor
from shardckpt.committed import check_space, read_committed
from shardckpt.container import FileSet
from shardckpt.conversion import Conversion
from shardckpt.derivation import Derivation, Piece
from shardckpt.endpoints import ReaderPool
from shardckpt.errors import CheckpointError, CheckpointExistsError, UnsupportedError, listing
from shardckpt.formats.huggingface import (
    ADAPTER_WEIGHTS_PATH,
    INDEX_PATH,
    is_weights_path,
    lay_out_files,
    lay_out_folder,
)
from shardckpt.manifest import Json
from shardckpt.storage import TEMPORARY_SUFFIX, Store
from shardckpt.team import Team, is_team_file
from shardckpt.tools.adapters import AdapterConfig, adapters_alone, has_adapters
from shardckpt.tools.companions import ADAPTER_CONFIG_PATH, CONFIG_PATH, Companions, config_in_step, is_weights_file
from shardckpt.tools.fit import fitted, fitted_by_config
from shardckpt.tools.name_rules import apply_rules
from shardckpt.tools.recast import NewDtype, recast
from shardckpt.tools.rules_file import Rule
from shardckpt.tools.selection import Choice, select
from shardckpt.tools.shares import cut_out, divide, meeting
from shardckpt.tools.wrappers import without_wrappers
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files

_TEMPORARY = re.compile(r"\.[^/]*\.[0-9a-f]{16}" + re.escape(TEMPORARY_SUFFIX))


@dataclass(frozen=True)
class ExportJob:
    """An export that is worked out but not begun.

    Attributes:
        source: What the checkpoint holds.
        store: Its root.
        files: The weights.
        pieces: What their tensors are made of, as in `Selection`.
        small_files: Path -> bytes of the files beside the weights, the index not among them.
        index: The index, if there are several files of weights.
        unchecked: Why names and shapes were not compared with the model's, where that was asked for; else "".
    """

    source: Catalogue
    store: Store
    files: FileSet
    pieces: Mapping[str, tuple[Piece, ...]]
    small_files: Mapping[str, bytes]
    index: bytes | None
    unchecked: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did.

    Attributes:
        leftovers: Unfinished files of an earlier run that were found and removed.
        conversions: What became of tensors that were written in another dtype.
    """

    leftovers: tuple[str, ...]
    conversions: tuple[Conversion, ...]


def plan_export(
    source: Store,
    *,
    choice: Choice,
    expected: Catalogue | None,
    companions: Companions | None,
    max_file_bytes: int | None,
    dtype: NewDtype | None = None,
    rules: Sequence[Rule] = (),
    leaves_base: bool = False,
) -> ExportJob:
    """Work out the folder: that of a model, or of LoRA adapters if the tensors are such.

    Args:
        source: Root of the checkpoint.
        choice: Which tensors.
        expected: Names and shapes that the model should have; None to ask transformers, where there is a config.
        companions: The files that go along; the config of adapters may come from the checkpoint too, if they were
            imported.
        max_file_bytes: As for `lay_out_folder`.
        dtype: Another dtype for some of them; None to keep all.
        rules: How they become the tensors of the other program.
        leaves_base: Write LoRA adapters alone, without their base model.

    Raises:
        MismatchError: If names or shapes are not the expected ones, or as `select`, `apply_rules`, `adapters_alone` and
            `recast`.
        UnsupportedError: If adapters would need several files.
    """
    found = read_committed(source)
    selection = apply_rules(without_wrappers(select(found, choice)), rules)
    small = {path: companions.read(path) for path in companions.paths} if companions else {}
    unchecked = ""
    is_adapter = leaves_base or has_adapters(selection)
    if is_adapter:
        small = _carried(found.objects) | small
        selection = adapters_alone(selection, AdapterConfig.read(small), leaves_base=leaves_base)
    if expected is not None:
        selection = fitted(selection, expected)
    elif CONFIG_PATH in small and not is_adapter:
        selection, unchecked = fitted_by_config(selection, small[CONFIG_PATH])
    if dtype is not None:
        selection = recast(selection, dtype)
    files, index = (_lay_out_adapter if is_adapter else lay_out_folder)(
        selection.tensors, max_file_bytes=max_file_bytes
    )
    if CONFIG_PATH in small:
        small[CONFIG_PATH] = config_in_step(small[CONFIG_PATH], selection.tensors)
    Derivation.assembling(found.catalogue, files.catalogue, selection.pieces)  # refuse now what does not fit
    return ExportJob(found.catalogue, source, files, selection.pieces, small, index, unchecked)


def _carried(objects: Json) -> dict[str, bytes]:
    """Give the config of adapters that an import has put into the checkpoint."""
    match objects:
        case {"adapter_config": str(text)}:
            return {ADAPTER_CONFIG_PATH: text.encode()}
    return {}


def _lay_out_adapter(tensors: Sequence[Tensor], *, max_file_bytes: int | None) -> tuple[FileSet, None]:
    """Lay out the weights of adapters: PEFT reads one file only."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if max_file_bytes is not None and nbytes > max_file_bytes:
        raise UnsupportedError(f"PEFT reads adapters from one file, which has {nbytes} bytes; allow as many in a file")
    return lay_out_files([(ADAPTER_WEIGHTS_PATH, tensors)]), None


def export(
    job: ExportJob, target: Store, *, overwrite: bool, options: TransferOptions, team: Team | None = None
) -> Exported:
    """Write the folder: nothing of it appears before all weights are there.

    Args:
        job: From `plan_export`.
        target: The folder.
        overwrite: Replace what a former export left there.
        options: How.
        team: The processes that do it together, each with the same job; None for this one alone.

    Raises:
        CheckpointExistsError: If something is there that is not to be replaced.
        CheckpointError: As `write_files`.
    """
    team = team or Team()
    with meeting(target, team, options) as (together, options):
        folder = _Folder(job, target, overwrite)
        leftovers = together.share(folder.begin)
        share = cut_out(job.files, divide(job.files, team.size)[team.rank])
        derivation = Derivation.assembling(job.source, share.files.catalogue, job.pieces)
        counted: list[bytes] = []

        def before_commit() -> None:
            counted.extend(together.gather(msgspec.json.encode(derivation.conversions)))
            together.share(folder.make_ready)

        try:
            with closing(ReaderPool(job.store)) as pool:
                sources = pool.sources([file.path for file in job.source.files])
                write_files(
                    job.source,
                    sources,
                    share.files,
                    target,
                    options=options,
                    derivation=derivation,
                    before_commit=before_commit,
                )
            together.gather(b"")
            if team.rank == 0:
                folder.complete()
        except BaseException:
            if team.rank == 0:
                folder.undo()
            raise
    conversions = [one for part in counted for one in msgspec.json.decode(part, type=list[Conversion])]
    return Exported(msgspec.json.decode(leftovers, type=tuple[str, ...]), tuple(conversions))


class _Folder:
    """What the first process does with the folder, besides the files of weights."""

    def __init__(self, job: ExportJob, target: Store, overwrite: bool) -> None:
        self._job, self._target, self._overwrite = job, target, overwrite
        self._names = {file.path for file in job.files.catalogue.files}
        self._old_weights: set[str] = set()
        self._new: list[str] = []

    def begin(self) -> bytes:
        """Refuse what is taken, and remove what an unfinished run has left; give the paths of that."""
        leftovers = refuse_taken(self._job, self._target, overwrite=self._overwrite)
        check_space(self._target, self._job.files.nbytes)
        for path in leftovers:
            self._target.delete(path)
        present = self._target.list()
        self._old_weights = {path for path in present if is_weights_path(path)}
        self._new = [path for path in (*self._names, *self._job.small_files) if path not in present]
        return msgspec.json.encode([path for path in leftovers if not is_team_file(path)])

    def make_ready(self) -> bytes:
        """All weights are written, none is visible: put the other files there."""
        for path, data in self._job.small_files.items():
            self._target.put(path, data)
        if self._job.index is not None:  # so that no reader takes old and new files for one model
            for path in self._old_weights - self._names | {INDEX_PATH} & self._old_weights:
                self._target.delete(path)
        return b""

    def complete(self) -> None:
        """All weights are visible: put the index there, and remove what is left of an old export."""
        if self._job.index is not None:
            self._target.put(INDEX_PATH, self._job.index)
        for path in self._old_weights - self._names - ({INDEX_PATH} if self._job.index is not None else set()):
            self._target.delete(path)

    def undo(self) -> None:
        """Remove the files that were not there before."""
        for path in self._new:
            with suppress(CheckpointError):  # the first error is the one to tell
                self._target.delete(path)


def refuse_taken(job: ExportJob, target: Store, *, overwrite: bool) -> tuple[str, ...]:
    """Find out whether the folder can be written to, and change nothing; give what an unfinished run has left there.

    Raises:
        CheckpointExistsError: If it holds other weights, or something that is not to be replaced.
    """
    present = target.list()
    others = [path for path in present if is_weights_file(path) and not is_weights_path(path)]
    if others:
        raise CheckpointExistsError(
            f"{target.url!r} has other weights: {listing(others)}, which might be loaded in place of these; choose "
            "another destination, or remove them"
        )
    taken = [
        path
        for path in present
        if not _TEMPORARY.fullmatch(path)
        and not (path in job.small_files and _is_same(target, path, job.small_files[path], present[path]))
    ]
    if taken and not overwrite:
        raise CheckpointExistsError(
            f"{target.url!r} is not empty: it has {listing(taken)}; choose another destination, or ask to overwrite it"
        )
    return tuple(path for path in present if _TEMPORARY.fullmatch(path))


def _is_same(target: Store, path: str, data: bytes, nbytes: int) -> bool:
    return nbytes == len(data) and target.get(path, max_nbytes=len(data)) == data
