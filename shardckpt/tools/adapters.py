"""LoRA adapters: which tensors of a model they are, and what PEFT calls them in its files.

Knows the names of PEFT and what its config says of shapes; refuses to know the base model. Other kinds of adapters are
refused, as is what PEFT would read back as something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardckpt.catalogue import Tensor
from shardckpt.errors import FormatError, MismatchError, UnsupportedError, listing
from shardckpt.tools.companions import ADAPTER_CONFIG_PATH
from shardckpt.tools.selection import Selection

_ROOT = "base_model.model."
"""Where PEFT's own model keeps the base model."""

_FACTORS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_LORA = {*_FACTORS, *_FACTORS.values(), "lora_magnitude_vector"}


class AdapterConfig(msgspec.Struct, frozen=True):
    """What is needed of an adapter_config.json, by the names there.

    Attributes:
        peft_type: The kind of adapters.
        r: Their rank.
        rank_pattern: Those of another rank.
        target_modules: Names of the modules that have adapters, or a pattern of them.
        modules_to_save: Names of modules that are saved whole.
        bias: Which biases are saved too.
        trainable_token_indices: Which rows of embeddings are saved too.
    """

    peft_type: str
    r: int = 8
    rank_pattern: dict[str, int] = {}
    target_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    bias: str = "none"
    trainable_token_indices: object = None

    @classmethod
    def read(cls, small_files: Mapping[str, bytes]) -> AdapterConfig:
        """Read the one among the files that go along.

        Raises:
            MismatchError: If there is none.
            FormatError: If it is damaged.
            UnsupportedError: If it is of another kind of adapters.
        """
        if ADAPTER_CONFIG_PATH not in small_files:
            raise MismatchError(
                f"there are LoRA adapters, which need their {ADAPTER_CONFIG_PATH}, as some of it (lora_alpha) is in no "
                "tensor; name it, or the folder that has it, with --like. To export a whole model, merge "
                "them before it is saved (merge_and_unload)."
            )
        try:
            found = msgspec.json.decode(small_files[ADAPTER_CONFIG_PATH], type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FormatError(f"{ADAPTER_CONFIG_PATH!r} is damaged ({error}); save it again with PEFT") from None
        if found.peft_type != "LORA":
            raise UnsupportedError(f"{ADAPTER_CONFIG_PATH!r} is of {found.peft_type!r}; only LORA is supported")
        if found.bias != "none" or found.trainable_token_indices is not None:
            raise UnsupportedError(
                f"{ADAPTER_CONFIG_PATH!r} has bias={found.bias!r} and "
                f"trainable_token_indices={found.trainable_token_indices!r}; only 'none' and None are supported. Save "
                "the adapters with PEFT itself."
            )
        return found

    def is_target(self, module: str) -> bool:
        """Tell whether PEFT gives a module an adapter.

        Raises:
            FormatError: If the pattern is none.
        """
        if self.target_modules is None or self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, list):
            return _ends_in(module, self.target_modules)
        try:
            return re.fullmatch(self.target_modules, module) is not None
        except re.error as error:
            raise FormatError(f"target_modules of {ADAPTER_CONFIG_PATH!r} is no pattern: {error}") from None

    def is_saved_whole(self, module: str) -> bool:
        """Tell whether PEFT saves all of a module."""
        return module.endswith(tuple(self.modules_to_save or ()))  # "norm" is also "input_layernorm" to PEFT


def has_adapters(selection: Selection) -> bool:
    """Tell whether there are LoRA tensors among others."""
    return any(not _LORA.isdisjoint(tensor.name.split(".")) for tensor in selection.tensors)


def adapters_alone(selection: Selection, config: AdapterConfig, *, leaves_base: bool) -> Selection:
    """Give the tensors of the adapters, as PEFT's files name them.

    Args:
        selection: Tensors of a model with adapters, or of adapters alone.
        config: Of the adapters.
        leaves_base: Leave out those of the base model; otherwise they are refused.

    Raises:
        MismatchError: If there are no adapters, or several, or other ones than `config` says.
    """
    members = [_Member.of(tensor.name, config) for tensor in selection.tensors]
    if not any(member.kind in _LORA for member in members):
        raise MismatchError("there are no LoRA tensors; check the names with `shardckpt inspect --tensors`")
    base = [tensor.name for tensor, one in zip(selection.tensors, members, strict=True) if one.kind == "base"]
    if base and not leaves_base:
        raise MismatchError(
            f"there are LoRA adapters beside the tensors of their base model: {listing(base)}. Write the adapters "
            "alone with --to peft; for the whole model, merge them before it is saved (merge_and_unload)."
        )
    adapters = {one.adapter for one in members if one.adapter}
    if len(adapters) > 1:
        raise MismatchError(
            f"there are several adapters: {listing(sorted(adapters))}; choose one, as in --only '*.{min(adapters)}.*'"
        )
    kept = [(t, one) for t, one in zip(selection.tensors, members, strict=True) if one.kind not in ("base", "replaced")]
    tensors = tuple(replace(tensor, name=one.name, aliases=()) for tensor, one in kept)
    _check(dict(zip((tensor.name for tensor in tensors), tensors, strict=True)), [one for _, one in kept], config)
    pieces = {one.name: found for tensor, one in kept if (found := selection.pieces.get(tensor.name))}
    return Selection(tensors, pieces)


@dataclass(frozen=True, slots=True)
class _Member:
    """What a tensor of a model with adapters is.

    Attributes:
        kind: One of `_LORA`, "saved" for a module that is saved whole, "replaced" for what that stands for, or "base".
        module: The module in the base model.
        adapter: Its name; "" if it is not told.
        name: As PEFT's files have it.
    """

    kind: str
    module: str
    adapter: str
    name: str

    @classmethod
    def of(cls, name: str, config: AdapterConfig) -> _Member:
        parts = name.removeprefix(_ROOT).split(".")
        for at, part in enumerate(parts):
            before, behind = ".".join(parts[:at]), parts[at + 1 :]
            if part in _LORA:
                is_plain = bool(behind) and behind[-1] in ("weight", "bias")
                adapter = ".".join(behind[:-1] if is_plain else behind)
                # as PEFT has it, which once kept this vector as a bare parameter
                last = [behind[-1]] if is_plain and part != "lora_magnitude_vector" else []
                return cls(part, before, adapter, _ROOT + ".".join([before, part, *last]))
            if part == "modules_to_save" and len(behind) > 1:
                return cls("saved", before, behind[0], _ROOT + ".".join([before, *behind[1:]]))
            if part == "original_module":
                return cls("replaced", before, "", name)
        module = ".".join(parts[:-1])
        kind = "saved" if config.is_saved_whole(module) else "base"
        return cls(kind, module, "", _ROOT + ".".join(parts))


def _ends_in(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _check(tensors: Mapping[str, Tensor], members: Sequence[_Member], config: AdapterConfig) -> None:
    """Refuse adapters that PEFT would not take as they are."""
    if len(tensors) < len(members):
        raise MismatchError("several tensors would have one name in PEFT's files; choose some with --only or --skip")
    if foreign := [one.module for one in members if one.kind in _LORA and not config.is_target(one.module)]:
        raise MismatchError(
            f"{ADAPTER_CONFIG_PATH!r} does not name these among its target_modules: {listing(foreign)}; PEFT would "
            "leave out their adapters. Take the config of this training."
        )
    present = {(one.module, one.kind): one.name for one in members}
    for (module, kind), name in present.items():
        other = {**_FACTORS, **{b: a for a, b in _FACTORS.items()}}.get(kind)
        if other is None:
            continue
        if (module, other) not in present:
            raise MismatchError(f"{name!r} is there without its {other}: the adapter is incomplete")
        if kind in _FACTORS:
            rank = tensors[name].shape[0]
            found = tensors[present[module, other]].shape
            if len(found) < 2 or found[1] != rank or not (config.rank_pattern or config.r == rank):
                raise MismatchError(
                    f"the adapter of {module!r} does not fit: {kind} has shape {tensors[name].shape}, {other} {found}, "
                    f"and {ADAPTER_CONFIG_PATH!r} says rank {config.r}. Take the config of this training."
                )
