"""`shardckpt export`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from shardckpt.catalogue import Catalogue
from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import TeamVerb
from shardckpt.cli.writing import plan_result, write_result
from shardckpt.errors import listing
from shardckpt.storage import Store, split_url
from shardckpt.tools.companions import Companions, config_alone, find_companions
from shardckpt.tools.export import export, plan_export, refuse_taken
from shardckpt.tools.fit import expected_of
from shardckpt.tools.recast import NewDtype
from shardckpt.tools.rules_file import MAX_RULES_NBYTES, Rule, parse_rules
from shardckpt.tools.selection import Choice


@click.command(
    "export", cls=TeamVerb, epilog="Example: shardckpt export step-000100 llama-hf --to hf --like config.json"
)
@options.source
@options.destination
@click.option(
    "--to",
    type=click.Choice(["hf", "peft"]),
    default="hf",
    show_default=True,
    help="The format: Hugging Face; or LoRA adapters alone, of a checkpoint that has their base model too.",
)
@click.option(
    "--like",
    metavar="DIR_OR_CONFIG",
    help="A folder of the same model, whose config, tokenizer and other files beside the weights go along, and whose "
    "weights say which names and shapes to expect; or a config.json, of which transformers knows them; or an "
    "adapter_config.json.",
)
@click.option("--rules", metavar="FILE", help="Rename, split, fuse, transpose or leave out tensors; see above.")
@click.option("--max-shard-size", type=options.ByteSize(), help="Most bytes in a file. [default: all in one]")
@options.choosing
@options.dtype
@options.writing
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    destination: str,
    to: str,
    like: str | None,
    rules: str | None,
    max_shard_size: int | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    dtype: NewDtype | None,
    writing: options.Writing,
    open_at: Callable[[str], Store],
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder.

    DST gets model.safetensors, or numbered files and their index, and what --like says; transformers loads it. LoRA
    adapters become adapter_model.safetensors, which PEFT loads; --like then names their adapter_config.json.

    A rules file holds {"rules": [...]}, each rule {"from": NAME, "to": NAME}. In names, {i} stands for a part without
    dots, {rest*} for any text. Several names in "to" split a tensor, several in "from" fuse them, along "dim" (0), in
    "sizes", "groups" times in turn; null in "to" leaves it out; "transpose": true swaps two dims. The first rule that
    fits is used.
    """
    target = open_at(destination)
    started = time.monotonic()
    companions, expected = _likeness(output, like, open_at)
    job = plan_export(
        open_at(source),
        choice=Choice(only, skip),
        expected=expected,
        companions=companions,
        max_file_bytes=max_shard_size,
        dtype=dtype,
        rules=_rules(rules, open_at),
        leaves_base=to == "peft",
    )
    if job.unchecked:
        output.note(f"names and shapes are not checked: {job.unchecked}")
    facts: Row = {
        "source": source,
        "destination": destination,
        "num_tensors": len(job.files.catalogue.tensors),
        "companions": sorted(job.small_files),
    }
    if writing.is_dry_run:
        leftovers = refuse_taken(job, target, overwrite=writing.is_overwriting)
        plan_result(output, facts, job.files, target, writing, leftovers)
        return
    with output.progress("export", job.files.nbytes) as on_progress:
        how = writing.transfer_options(on_progress)
        done = export(job, target, overwrite=writing.is_overwriting, options=how, team=output.team)
    write_result(output, facts, job.files, started, done.leftovers, done.conversions)


def _rules(url: str | None, open_at: Callable[[str], Store]) -> list[Rule]:
    if url is None:
        return []
    folder, name = split_url(url)
    return parse_rules(open_at(folder).get(name, max_nbytes=MAX_RULES_NBYTES), url)


def _likeness(
    output: Output, like: str | None, open_at: Callable[[str], Store]
) -> tuple[Companions | None, Catalogue | None]:
    """Give the files that go along, and the names that are expected."""
    if like is None:
        return None, None
    if like.endswith(".json"):
        folder, name = split_url(like)
        return config_alone(open_at(folder), name), None
    store = open_at(like)
    companions, expected = find_companions(store), expected_of(store)
    if companions.left_out:
        output.note(f"left out, as they are too large: {listing(companions.left_out)}")
    if isinstance(expected, str):
        output.detail(f"there are no weights to compare with: {expected}")
        return companions, None
    return companions, expected
