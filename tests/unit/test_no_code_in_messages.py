"""Nothing is unpickled, evaluated or imported because a message says so: the package has no such call to misuse.

Where one is needed all the same, it is listed here with the reason why no message reaches it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import taskmesh

PACKAGE = Path(taskmesh.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "runpy",
    "code",
    "joblib",
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {
    "import_module",  # importlib
    "exec_module",
    "load_module",
    "entry_points",  # importlib.metadata
    "loads",  # pickle's, marshal's
    "literal_eval",
    "resolve_name",
}
ALLOWED: dict[tuple[str, str], str] = {
    ("cli/loading.py", "import_module"): "the application that the command line names",
    ("cli/main.py", "import_module"): "a module of the package, by a name that stands in the source",
    ("cli/inspect.py", "import_module"): "the same",
    ("cli/worker_process.py", "import_module"): "the same",
    (
        "codec.py",
        "entry_points",
    ): "two groups of wire types, numpy's and torch's, by names that stand in the source",
    (
        "worker/process_main.py",
        "import_module",
    ): "the module of a handler that the worker itself has registered",
    ("worker/process_main.py", "exec"): "the worker's own program, where its handlers are in __main__",
    ("worker/process_main.py", "compile"): "the same",
    ("signatures.py", "get_type_hints"): "annotations of the application's own handlers",
}
# Libraries' functions that evaluate or unpickle what they are given.
LIBRARIES = {"get_type_hints", "from_pickle", "read_pickle", "load_state_dict_from_url"}


def suspicious(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that could turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.lineno, node.module or ""
            yield from (
                (node.lineno, name.name) for name in node.names if name.name in ATTRIBUTES | LIBRARIES
            )
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in CALLS:
                yield node.lineno, function.id
            elif isinstance(function, ast.Attribute) and function.attr in ATTRIBUTES | LIBRARIES:
                yield node.lineno, function.attr
            elif _is_pickling_load(function):
                yield node.lineno, ast.unparse(function)


def _is_pickling_load(function: ast.expr) -> bool:
    """``torch.load`` and ``numpy.load`` unpickle."""
    return (
        isinstance(function, ast.Attribute)
        and function.attr in ("load", "fromfile")
        and isinstance(function.value, ast.Name)
        and function.value.id in ("torch", "np", "numpy", "yaml")
    )


def test_there_is_no_such_call_but_those_with_a_reason() -> None:
    found = {
        (str(module.relative_to(PACKAGE)), name): line
        for module in PACKAGE.rglob("*.py")
        for line, name in suspicious(ast.parse(module.read_text()))
    }
    unexplained = [
        f"{path}:{line}: {name}" for (path, name), line in found.items() if (path, name) not in ALLOWED
    ]
    assert unexplained == []
    assert set(ALLOWED) - set(found) == set(), "these reasons are for nothing"


@pytest.mark.parametrize(
    "program",
    [
        "import pickle",
        "from pickle import loads as read",
        "import importlib; importlib.import_module(name)",
        "from importlib import import_module",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
        "__import__(name)",
        "torch.load(file)",
        "np.load(file)",
    ],
)
def test_what_it_would_find(program: str) -> None:
    assert list(suspicious(ast.parse(program)))


def test_the_compiled_packages_are_told_not_to_run_code() -> None:
    """msgpack's timestamps and strings are data; numpy's objects, which are pickles, never get to it."""
    arrays = (PACKAGE / "arrays.py").read_text()
    assert "allow_pickle" not in arrays
    assert "O" not in arrays.partition('_KINDS = "')[2].partition('"')[0]
