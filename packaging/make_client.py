"""Write what type checkers read of phosd.client.Client, whose methods are made from AsyncClient's.

python packaging/make_client.py [--check]
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "phosd/client/async_client.py"
STUB = ROOT / "phosd/client/sync_client.pyi"
_HEAD = """# Written by `python packaging/make_pages.py`.
# ruff: noqa
# fmt: off
"""
_OWN = """
class Client:
    def __init__(self, bus: str | None = None, *, interactive: bool = False) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
"""
_INSTEAD = {
    "AsyncJobHandle": "JobHandle",
    "AsyncGenerator[Change, None]": "Iterator[Change]",
}
"""What a method returns that is not awaited."""


def stub(source: str) -> str:
    """Return the stub, from the source of :class:`AsyncClient`."""
    tree = ast.parse(source)
    methods = "".join(_methods(tree))
    body = _OWN + methods
    imports = "".join(sorted(_imports(tree, {*re.findall(r"\w+", body)})))
    return (
        f"{_HEAD}from collections.abc import Iterator\nfrom typing import Self, Unpack\n\n"
        f"from phosd.client.async_client import Change\n{imports}{body}"
    )


def _methods(tree: ast.Module) -> Iterator[str]:
    (client,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AsyncClient")
    for method in client.body:
        if not isinstance(method, ast.AsyncFunctionDef) or method.decorator_list:
            continue
        if not method.name.startswith("_") and method.name != "close":
            assert method.returns is not None
            gives = ast.unparse(method.returns).strip("'\"")
            gives = _INSTEAD.get(gives, gives)
            yield f"    def {method.name}({ast.unparse(method.args)}) -> {gives}: ...\n"


def _imports(tree: ast.Module, used: set[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phosd.client"):
            names = sorted({alias.name for alias in node.names} & used)
            if names:
                yield f"from {node.module} import {', '.join(names)}\n"
    yield "from phosd.client.sync_job import JobHandle as JobHandle\n"


def files() -> dict[Path, str]:
    """Return what :mod:`make_pages` writes."""
    return {STUB: stub(SOURCE.read_text())}
