"""The rules file of an export: what it may say, and reading it from untrusted bytes.

{"rules": [
  {"from": "decoder.{i}.mlp.{rest*}", "to": "model.layers.{i}.mlp.{rest*}"},
  {"from": "h.{i}.qkv.weight", "to": ["h.{i}.q.weight", "h.{i}.k.weight", "h.{i}.v.weight"], "groups": 8},
  {"from": ["{n*}.gate.weight", "{n*}.up.weight"], "to": "{n*}.gate_up.weight"},
  {"from": "{n*}.c_fc.weight", "to": "{n*}.c_fc.weight", "transpose": true},
  {"from": "{n*}.rotary.inv_freq", "to": null}
]}
"""

from __future__ import annotations

import msgspec

from shardckpt.errors import FormatError
from shardckpt.tools.templates import Template

MAX_RULES_NBYTES = 16 << 20


class Rule(msgspec.Struct, forbid_unknown_fields=True, rename={"sources": "from", "targets": "to"}):
    """One rule.

    Attributes:
        sources: Template of the name, or several to be fused, in order.
        targets: Template of the new name, several to be split into, or None to leave the tensor out.
        dim: Along which to split or fuse.
        sizes: Sizes of the parts along `dim`, in one group; None for equal parts when splitting, for all when fusing.
        groups: The parts take turns, so many times, as the heads of fused attention weights do.
        transpose: Swap the two dims of the tensor.
    """

    sources: str | list[str]
    targets: str | list[str] | None
    dim: int = 0
    sizes: list[int] | None = None
    groups: int = 1
    transpose: bool = False


class _Rules(msgspec.Struct, forbid_unknown_fields=True):
    rules: list[Rule]


def parse_rules(text: bytes, path: str) -> list[Rule]:
    """Read a rules file.

    Raises:
        FormatError: If it is none; names the rule and what is wrong with it.
    """
    try:
        rules = msgspec.json.decode(text, type=_Rules).rules
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path!r} is no rules file: {error}; see `shardckpt export --help`") from None
    for number, rule in enumerate(rules):
        if wrong := _wrong_with(rule):
            raise FormatError(f"rule {number + 1} of {path!r} {wrong}")
    return rules


def templates_of(texts: str | list[str] | None) -> list[Template]:
    """Give the templates of one side of a rule."""
    listed = [texts] if isinstance(texts, str) else texts or []
    return [Template(text) for text in listed]


def _wrong_with(rule: Rule) -> str:
    """Say what is wrong with a rule, if anything."""
    sources, targets = templates_of(rule.sources), templates_of(rule.targets)
    if not sources or rule.targets == []:
        return "has an empty list; name at least one tensor, or null for 'to'"
    if len(sources) > 1 and len(targets) != 1:
        return "has several names in 'from' and not one in 'to'; write two rules"
    if unknown := [name for one in (*sources, *targets) for name in one.placeholders - sources[0].placeholders]:
        return f"uses {{{unknown[0]}}}, which the first name in 'from' does not have"
    parts = max(len(sources), len(targets))
    if rule.dim < 0 or rule.groups < 1 or min(rule.sizes or [1]) < 1:
        return "has a negative dim, or groups or sizes that are not positive"
    if rule.sizes is not None and len(rule.sizes) != parts:
        return f"has {len(rule.sizes)} sizes for {parts} parts"
    if rule.transpose and parts > 1:
        return "transposes and splits or fuses; write two rules and export twice"
    return ""
