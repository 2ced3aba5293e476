"""Write the reference of the Python API into docs/reference/python.md, from the docstrings and the
signatures of what phosd.client, phosd.engine and phosd.errors export.

It reads the sources and imports nothing, so that every Python writes the same page.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/python.md"
BEGIN, END = "<!-- API: python packaging/make_pages.py -->", "<!-- end of API -->"
PACKAGES = ("phosd.client", "phosd.engine", "phosd.errors")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function
_KINDS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_ROLE = re.compile(r":\w+:`(?:~[\w.]*\.)?([\w.]+)`")
_LITERAL = re.compile(r"``(.+?)``")


@dataclass(frozen=True)
class Export:
    """A name that a package exports, and its definition, or the value of an alias."""

    name: str
    node: Definition | ast.expr


def source_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def exports(package: str) -> list[Export]:
    """Return what a package exports by ``__all__``, or the classes of a module that has none."""
    tree = source_of(package)
    if not _assigned(tree, "__all__"):
        return [Export(node.name, node) for node in tree.body if isinstance(node, ast.ClassDef)]
    names = ast.literal_eval(_assigned(tree, "__all__")[0])
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return [Export(name, _definition(modules[name], name)) for name in names]


def _assigned(tree: ast.Module, name: str) -> list[ast.expr]:
    return [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]


def _definition(module: str, name: str) -> Definition | ast.expr:
    tree = source_of(module)
    for node in tree.body:
        if isinstance(node, _KINDS) and node.name == name:
            return node
    if values := _assigned(tree, name):
        return values[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            assert node.module is not None
            return _definition(node.module, name)
    raise SystemExit(f"{module} exports {name}, which it does not define: correct the export")


def entry(export: Export) -> Iterator[str]:
    """Yield the lines of an entry."""
    yield f"### `{export.name}`"
    yield ""
    match export.node:
        case ast.ClassDef() as node:
            yield from _class(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            yield from _function(node)
        case value:
            yield f"    {export.name} = {ast.unparse(value)}"
            yield ""


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    fields = list(_fields(node))
    methods = [each for each in node.body if isinstance(each, Function) and _public(each)]
    constants = "enum." in bases
    if fields and not constants:
        yield f"    class {node.name}({bases})".removesuffix("()") + ":"
        yield from (f"        {text}" for text, _ in fields)
        yield ""
    yield from _prose(ast.get_docstring(node))
    yield from _constructor(node)
    for text, said in fields:
        if said:
            name = text if constants else text.partition(":")[0].partition(" =")[0]
            yield f"- `{name}`: {_line(said)}"
    if any(said for _, said in fields):
        yield ""
    for method in methods:
        yield f"#### `{node.name}.{method.name}`"
        yield ""
        yield from _function(method)


def _constructor(node: ast.ClassDef) -> Iterator[str]:
    """Yield how the class is called, if its constructor says what that does."""
    for each in node.body:
        if isinstance(each, Function) and each.name == "__init__" and ast.get_docstring(each):
            yield f"    {node.name}({_arguments(each)})"
            yield ""
            yield from _prose(ast.get_docstring(each))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield each public field, or member of an enumeration, with what is said of it."""
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign):
            target: ast.expr = each.target
        elif isinstance(each, ast.Assign):
            target = each.targets[0]
        else:
            continue
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            yield _stated(each) or (ast.unparse(each), _text_of(after))


def _stated(field: ast.AnnAssign | ast.Assign) -> tuple[str, str] | None:
    """Return a field of phosd.interface with what is said of it: a property of a record, or an
    option of a ``TypedDict``. None for another field.
    """
    if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
        return None
    match field:
        case ast.AnnAssign(value=ast.Call(func=ast.Name("prop"), args=[_, _, said])):
            kind = ast.unparse(field.annotation)
        case ast.AnnAssign(
            annotation=ast.Subscript(
                value=ast.Name("Annotated"),
                slice=ast.Tuple(elts=[typed, ast.Call(args=[said, *_])]),
            )
        ):
            kind = ast.unparse(typed)
        case _:
            return None
    return f"{field.target.id}: {kind}", str(ast.literal_eval(said))


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


def _public(node: Function) -> bool:
    return not node.name.startswith("_") and ast.get_docstring(node) is not None


def _function(node: Function) -> Iterator[str]:
    before = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    kinds = {ast.unparse(each) for each in node.decorator_list}
    gives = f" -> {_plain(node.returns)}" if node.returns else ""
    if "property" in kinds:
        yield f"    {node.name}: {gives.removeprefix(' -> ')}"
    else:
        yield f"    {before} {node.name}({_arguments(node)}){gives}"
    yield ""
    yield from _prose(ast.get_docstring(node))


def _arguments(node: Function) -> str:
    words = [*_named(node.args)]
    return ", ".join(words[1:] if words[:1] in (["self"], ["cls"]) else words)


def _named(arguments: ast.arguments) -> Iterator[str]:
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + [*arguments.defaults]
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {_plain(argument.annotation)}" if argument.annotation else ""
    return argument.arg + kind + (f" = {ast.unparse(default)}" if default else "")


def _plain(annotation: ast.expr) -> str:
    """Return a type as one reads it, also of a class that is defined further below."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _prose(text: str | None) -> Iterator[str]:
    """Yield a docstring in Markdown: a paragraph a line, and code as it is."""
    for part in (text or "").split("\n\n"):
        yield from part.splitlines() if part.startswith("    ") else [_line(part)]
        yield ""


def _line(text: str) -> str:
    return _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", " ".join(text.split())))


def reference() -> str:
    """Return the reference in Markdown."""
    lines: list[str] = []
    for package in PACKAGES:
        lines += [f"## `{package}`", ""]
        for export in exports(package):
            lines += entry(export)
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the reference between its marks. Raises :class:`SystemExit`."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE}: there is no place for the API; put back {BEGIN} and {END}")
    return f"{before}{begin}\n\n{reference()}\n{end}{after}"


def files() -> dict[Path, str]:
    """Return what :mod:`make_pages` writes."""
    return {PAGE: page(PAGE.read_text())}
