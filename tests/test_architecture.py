"""The rules of the tree, enforced: layers, confinement of third-party imports, no cycles, mirrored folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "runtime" / "astrai_runtime"
TOOL = ROOT / "astrai_deploy"

LAYERS = {
    **dict.fromkeys(("part", "errors", "machine", "request", "event", "stream", "sequence", "batch", "metrics", "log"), 0),
    **dict.fromkeys(("kv", "attention", "sampling", "text", "weights", "sources", "kernels"), 1),
    "model": 2,
    **dict.fromkeys(("provider", "inflight", "step"), 3),
    **dict.fromkeys(("scheduler", "generate", "loop"), 4),
    **dict.fromkeys(("engine", "relay"), 5),
    **dict.fromkeys(("agents", "protocols"), 6),
    "server": 7,
}
TOOL_ORDER = (
    "cli",
    "service",
    "chat",
    "build",
    "kernels",
    "plan_report",
    "plan",
    "report",
    "compose",
    "origins",
    "schema",
    "parts",
    "paths",
)
CONFINED = {
    "hydra": ("astrai_deploy/compose.py", "astrai_deploy/origins.py", "astrai_deploy/_hydra"),
    "omegaconf": ("astrai_deploy/compose.py", "astrai_deploy/origins.py", "astrai_deploy/_hydra"),
    "litestar": ("runtime/astrai_runtime/server/",),
    "uvicorn": ("runtime/astrai_runtime/server/",),
    "safetensors": ("runtime/astrai_runtime/weights/",),
    "gguf": ("runtime/astrai_runtime/weights/",),
    "tokenizers": ("runtime/astrai_runtime/text/",),
    "jinja2": ("runtime/astrai_runtime/text/",),
    "huggingface_hub": ("runtime/astrai_runtime/sources/hub.py", "runtime/astrai_runtime/sources/_hub"),
    "prometheus_client": ("runtime/astrai_runtime/server/metrics.py",),
    "opentelemetry": ("runtime/astrai_runtime/server/_tracing.py",),
    "httpx": ("runtime/astrai_runtime/provider/",),
    "structlog": ("runtime/astrai_runtime/log.py",),
    "rich": ("astrai_deploy/",),
    "transformers": (),
}
# These may import torch only inside functions: the plan, the CLI and completion answer without it.
TORCH_FREE = ("astrai_deploy/", "base.py", "_config.py")


@dataclass(frozen=True)
class Import:
    """One import statement: what it names, and whether importing the file executes it."""

    file: Path
    line: int
    module: str
    executed: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def _sources() -> list[Path]:
    return sorted([*RUNTIME.rglob("*.py"), *TOOL.rglob("*.py")])


def _is_type_checking(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(file: Path) -> Iterator[Import]:
    def walk(node: ast.AST, executed: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = executed
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and _is_type_checking(child)
            ):
                inside = False
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(file, child.lineno, name.name, executed)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno}: relative imports hide the layer they cross"
                yield Import(file, child.lineno, child.module or "", executed)
                for name in child.names:  # `from package import module` names a module too
                    yield Import(file, child.lineno, f"{child.module}.{name.name}", executed)
            yield from walk(child, inside)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), True)


def _all_imports() -> list[Import]:
    return [found for file in _sources() for found in _imports(file)]


def _module(file: Path) -> str:
    base = ROOT / "runtime" if file.is_relative_to(RUNTIME) else ROOT
    parts = list(file.relative_to(base).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _layer(module: str) -> tuple[int, str] | None:
    """(layer, folder or file of that layer) of one of our modules; None for the bare package and for foreign ones."""
    parts = module.split(".")
    if parts[0] == "astrai_deploy":
        return 8, "astrai_deploy"
    if parts[0] != "astrai_runtime" or len(parts) == 1:
        return None
    return LAYERS[parts[1]], parts[1]


def test_every_runtime_folder_and_file_has_a_layer() -> None:
    known = {
        child.stem if child.suffix == ".py" else child.name for child in RUNTIME.iterdir() if not child.name.startswith("__")
    }
    assert known - {"py.typed"} <= set(LAYERS)


def test_imports_point_down_the_layers() -> None:
    wrong = []
    for found in _all_imports():
        here, there = _layer(_module(found.file)), _layer(found.module)
        if here and there and (there[0] > here[0] or (there[0] == here[0] > 0 and there[1] != here[1] and found.executed)):
            wrong.append(f"{found} (layer {here[0]} -> {there[0]})")
    assert not wrong, "\n".join(wrong)


def test_the_tool_imports_in_one_order() -> None:
    wrong = []
    for found in _all_imports():
        here, there = _module(found.file).split("."), found.module.split(".")
        if here[0] == there[0] == "astrai_deploy" and len(here) > 1 and len(there) > 1:
            a, b = here[1], there[1]
            if a in TOOL_ORDER and b in TOOL_ORDER and TOOL_ORDER.index(b) < TOOL_ORDER.index(a):
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_third_party_libraries_stay_in_their_place() -> None:
    wrong = []
    for found in _all_imports():
        allowed = CONFINED.get(found.module.split(".")[0])
        where = found.file.relative_to(ROOT).as_posix()
        if allowed is not None and not any(where.startswith(prefix) for prefix in allowed):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_contracts_choices_and_the_tool_import_no_torch() -> None:
    wrong = []
    for found in _all_imports():
        where = found.file.relative_to(ROOT).as_posix()
        choice = (
            found.file.parent.parent == RUNTIME
            and not found.file.name.startswith("_")
            and found.file.parent.name != "server"
        )
        if (
            found.executed
            and found.module.split(".")[0] == "torch"
            and (choice or where.startswith("astrai_deploy/") or where.endswith(TORCH_FREE))
        ):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_no_module_is_part_of_an_import_cycle() -> None:
    ours = {_module(file) for file in _sources()}
    graph: dict[str, set[str]] = {module: set() for module in ours}
    for found in _all_imports():
        if found.executed and found.module in ours and found.module != _module(found.file):
            graph[_module(found.file)].add(found.module)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, (*path, module))
        done.add(module)

    for module in sorted(ours):
        visit(module, ())


GROUPS_BY_KIND = ("kv", "scheduler", "provider", "protocols")


@pytest.mark.parametrize("group", GROUPS_BY_KIND)
def test_every_option_file_names_a_part_and_every_part_has_an_option_file(group: str) -> None:
    from astrai_runtime import part

    def kinds(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            yield from [node["kind"]] if isinstance(node.get("kind"), str) else []
            for child in node.values():
                yield from kinds(child)

    declared = {kind for file in (ROOT / "conf" / group).glob("*.yaml") for kind in kinds(yaml.safe_load(file.read_text()))}
    assert declared == set(part.names(group))


def test_every_group_folder_has_a_contract_and_a_test_folder() -> None:
    for folder in (
        child for child in RUNTIME.iterdir() if child.is_dir() and child.name not in {"__pycache__", "text", "server"}
    ):
        assert (folder / "base.py").is_file(), f"{folder.name}/ has no base.py"
    for folder in (child for child in RUNTIME.iterdir() if child.is_dir() and child.name != "__pycache__"):
        assert list((ROOT / "tests" / folder.name).glob("test_*.py")), f"tests/{folder.name}/ has no tests"


def test_data_folders_hold_no_python() -> None:
    assert not [*(ROOT / "conf").rglob("*.py"), *(ROOT / "recipes").rglob("*.py"), *(ROOT / "csrc").rglob("*.py")]


def test_package_files_do_nothing_but_list_names() -> None:
    for file in _sources():
        if file.name == "__init__.py":
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                assert isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign), (
                    f"{file}:{node.lineno} does something"
                )


def test_every_file_begins_with_a_sentence() -> None:
    for file in _sources():
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        assert docstring, f"{file.relative_to(ROOT)} does not say what it is"
