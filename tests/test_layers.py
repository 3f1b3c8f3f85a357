"""The architecture as a test: imports go down only, and what belongs in one file stays in it.

Reads the syntax trees of both packages, with the imports inside functions and for type checking, and runs none of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import pytest

from tests.layers import COLLECTIVES_IN, FLOORS, MAY_TOUCH_PRIVATE, ONLY_IN

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(FLOORS)
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "barrier", "batch_isend_irecv", "broadcast", "gather")
COLLECTIVES += ("irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "scatter", "send")


@dataclass(frozen=True)
class Import:
    """One imported module or name: `from a.b import c` gives "a.b.c"."""

    name: str
    line: int
    in_function: bool


@dataclass(frozen=True)
class Source:
    """A file of a package; its name is that under the package, without suffix."""

    package: str
    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def __str__(self) -> str:
        return f"{self.package}/{self.name}"


@lru_cache
def _sources(package: str) -> tuple[Source, ...]:
    folder = ROOT / package
    paths = sorted(folder.rglob("*.py"))
    return tuple(Source(package, str(p.relative_to(folder).with_suffix("")), p.read_text()) for p in paths)


def _walk(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, in_function
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, inside)


def _imports(source: Source) -> Iterator[Import]:
    for node, in_function in _walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import; write the package's name"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, in_function)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _floor(package: str, name: str) -> int | None:
    floors = FLOORS[package]
    exact = [number for number, names in enumerate(floors) if name in names]
    fitting = [number for number, names in enumerate(floors) if _matches(name, names)]
    return (exact or fitting or [None])[0]


def _target(package: str, imported: str) -> str | None:
    """Give the file of `package` that an import leads to, or None if it leads elsewhere."""
    parts = imported.split(".")
    if parts[0] != package:
        return None
    names = {source.name for source in _sources(package)}
    for length in (len(parts), len(parts) - 1):
        path = "/".join(parts[1:length])
        if path in names:
            return path
        if (init := f"{path}/__init__".lstrip("/")) in names:
            return init
    return "/".join(parts[1:])


@pytest.mark.parametrize("package", PACKAGES)
def test_each_file_has_a_floor(package: str) -> None:
    """Every file stands in the table."""
    missing = [str(source) for source in _sources(package) if _floor(package, source.name) is None]
    assert not missing, f"no floor for {missing}: add them to FLOORS in tests/layers.py, above everything they import"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_names_no_file_that_is_gone(package: str) -> None:
    """Every entry of the table, the lists of exceptions included, fits a file."""
    names = {source.name for source in _sources(package)}
    listed = [name for floor in FLOORS[package] for name in floor]
    listed += [name for files in ONLY_IN[package].values() for name in files]
    listed += COLLECTIVES_IN[package]
    listed += [file.partition("/")[2] for file, _ in MAY_TOUCH_PRIVATE if file.startswith(f"{package}/")]
    stale = [entry for entry in listed if not any(fnmatchcase(name, entry) for name in names)]
    assert not stale, f"tests/layers.py names files of {package} that do not exist: {stale}; remove them"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package: str) -> None:
    """A file imports only lower floors of its own package, so there is no cycle."""
    wrong = []
    for source in _sources(package):
        here = _floor(package, source.name)
        for imported in _imports(source):
            target = _target(package, imported.name)
            there = None if target is None else _floor(package, target)
            if here is not None and there is not None and there >= here:
                wrong.append(f"{source}:{imported.line}: {source.name} (floor {here}) -> {target} (floor {there})")
    assert not wrong, "these imports do not go down:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_belongs_in_few_files_is_imported_there_only(package: str) -> None:
    """torch, click, fsspec, threads and the other package are known to the listed files alone."""
    wrong = []
    for source in _sources(package):
        for imported in _imports(source):
            fitting = [key for key in ONLY_IN[package] if f"{imported.name}.".startswith(f"{key}.")]
            if fitting and not _matches(source.name, ONLY_IN[package][max(fitting, key=len)]):
                wrong.append(f"{source}:{imported.line}: imports {imported.name}")
    assert not wrong, "not allowed here (ONLY_IN of tests/layers.py says where it is):\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_collectives_are_issued_in_one_file(package: str) -> None:
    """No other file calls a collective of torch.distributed."""
    wrong = []
    for source in _sources(package):
        if source.name in COLLECTIVES_IN[package]:
            continue
        wrong += [f"{source}:{line}: {name}" for name, line in _collectives(source)]
    assert not wrong, f"collectives outside {COLLECTIVES_IN[package]}:\n" + "\n".join(wrong)


def _collectives(source: Source) -> Iterator[tuple[str, int]]:
    modules = {"torch.distributed"}
    for node, _ in _walk(source.tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and alias.name == "torch.distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.distributed"):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith(COLLECTIVES))
        elif (
            isinstance(node, ast.Attribute) and node.attr.startswith(COLLECTIVES) and ast.unparse(node.value) in modules
        ):
            yield node.attr, node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_touches_private_names_of_others(package: str) -> None:
    """An underscore attribute is used through `self`, or in the file of its class; no private name is imported."""
    wrong = [
        f"{source}:{line}: {name}"
        for source in _sources(package)
        for name, line in _private(source)
        if (str(source), name.rpartition(" ")[2]) not in MAY_TOUCH_PRIVATE
    ]
    assert not wrong, "private names of others (MAY_TOUCH_PRIVATE lists the exceptions, with reasons):\n" + "\n".join(
        wrong
    )


def _private(source: Source) -> Iterator[tuple[str, int]]:
    own = _members(source)
    for node, _ in _walk(source.tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            if any(map(_is_private, str(node.module).split("."))):
                yield str(node.module), node.lineno
            yield from ((alias.name, node.lineno) for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if any(map(_is_private, a.name.split("."))))


def _members(source: Source) -> set[str]:
    """Give the methods and class attributes that a file defines; it may use them, its private ones too."""
    classes = [node for node, _ in _walk(source.tree) if isinstance(node, ast.ClassDef)]
    methods = {node.name for found in classes for node in found.body if isinstance(node, ast.FunctionDef)}
    values = [node for found in classes for node in found.body if isinstance(node, ast.Assign)]
    return methods | {target.id for node in values for target in node.targets if isinstance(target, ast.Name)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_inside_functions_say_why(package: str) -> None:
    """A group of imports inside a function has a comment on its first line or the line before."""
    wrong = []
    for source in _sources(package):
        lines = source.text.splitlines()
        late = sorted({imported.line for imported in _imports(source) if imported.in_function})
        for line in late:
            group = line
            while not lines[group - 2].strip() or group - 1 in late:
                group -= 1
            if not any("#" in lines[number - 1] for number in (group, group - 1)):
                wrong.append(f"{source}:{line}: {lines[line - 1].strip()}")
    assert not wrong, "imports inside functions without a comment that gives the reason:\n" + "\n".join(wrong)


def test_the_rules_can_fail() -> None:
    """The readers behind the rules find what they look for in a file that breaks them all."""
    text = "import torch.distributed as dist\nfrom a._b import c\n"
    text += "def f(x):\n    import threading\n    dist.all_reduce(x._y)\n"
    source = Source("shardckpt", "bad", text)
    assert [(i.name, i.in_function) for i in _imports(source)] == [
        ("torch.distributed", False),
        ("a._b.c", False),
        ("threading", True),
    ]
    assert list(_collectives(source)) == [("all_reduce", 5)]
    assert sorted(_private(source)) == [("_y", 5), ("a._b", 2)]
    assert _target("shardckpt", "shardckpt.errors.CheckpointError") == "errors"
    assert _target("shardckpt", "shardckpt.cli") == "cli/__init__"
    assert _floor("shardckpt", "no_such_file") is None
