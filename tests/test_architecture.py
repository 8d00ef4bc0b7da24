"""The house: which floor may import which, how large files grow, and that the package lists are complete."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"ds_configs": 0, "plugins": 1, "trainers": 2, "cli": 3}
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets", "bitsandbytes"}
LONGEST_FILE = 350
LONGEST_FUNCTION = 50
LARGEST_ROOM = 21
"""Twenty files and the `__init__` that says how to come in."""


def sources() -> list[Path]:
    return sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, *, top_level_only: bool = False) -> list[tuple[str, ...]]:
    """Absolute module paths that a file imports, relative imports resolved against the repository root."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(ROOT).parent.parts
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: list[tuple[str, ...]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(tuple((node.module or "").split(".")))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            target = (*base, *(node.module or "").split(".")) if node.module else base
            found += [(*target, alias.name) for alias in node.names] if not node.module else [target]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path):
    floor = FLOORS[path.relative_to(ROOT).parts[0]]
    for target in imports(path):
        assert target[0] != "shardwright", "imports inside the package are relative"
        if target[0] in FLOORS:
            assert FLOORS[target[0]] <= floor, f"{path} imports {'.'.join(target)} from a floor above"


def test_planning_floor_loads_no_heavy_library_anywhere():
    for path in (ROOT / "ds_configs").rglob("*.py"):
        for target in imports(path):
            assert target[0] not in HEAVY, f"{path} imports {target[0]}"


def test_upper_floors_load_heavy_libraries_inside_functions():
    """`shardwright --help` and planning stay fast only if no module pulls torch in when it is imported."""
    workers = re.compile(
        r"activations/(worker|meter|run|fit|families|kind_models|kinds|narrow_values)|byte_meter|trainer_phases|_callback|/callback"
    )
    # A subclass needs its base when the module loads; nobody imports these before they are used.
    subclasses = re.compile(
        r"trainer\.py|deepspeed_pipeline/(stage|module)\.py|self_teacher|contrastive|formats/(transformers_quantizer|vllm_loader)|qat/(callback|rounding/layers|rounding/\w+_linear)\.py"
    )
    for path in sources():
        if workers.search(path.as_posix()) or subclasses.search(path.as_posix()):
            continue
        for target in imports(path, top_level_only=True):
            assert target[0] not in HEAVY, f"{path} imports {target[0]} at module level"


def test_there_are_no_import_circles():
    graph = {}
    modules = {module_of(path): path for path in sources()}
    for module, path in modules.items():
        targets = imports(path, top_level_only=True)
        graph[module] = {t for t in targets if t in modules} | {t[:-1] for t in targets if t[:-1] in modules} - {module}
    finished: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], trail: tuple[tuple[str, ...], ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join('.'.join(m) for m in (*trail, module))}"
        if module in finished:
            return
        for target in graph[module] - {module}:
            if module[: len(target)] != target:
                visit(target, (*trail, module))
        finished.add(module)

    for module in graph:
        visit(module, ())


def room_of(module: tuple[str, ...]) -> tuple[str, ...]:
    """The folder of a module; `__init__` only names what its room offers, and is no part of the graph."""
    return module[:-1]


def room_graph() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The rooms that each room imports from, itself among them."""
    modules = {module_of(path) for path in sources() if path.name != "__init__.py"}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in sources():
        if path.name == "__init__.py":
            continue
        room = room_of(module_of(path))
        targets = {target if target in modules else target[:-1] for target in imports(path)}
        graph.setdefault(room, set()).update(room_of(each) for each in targets if each in modules)
    return graph


def test_rooms_form_no_circles():
    """Imports inside functions count: a room that needs another one only later needs it all the same."""
    # Leaves go until none is left; what remains holds a circle.
    left = {room: targets - {room} for room, targets in room_graph().items()}
    while leaves := {room for room, targets in left.items() if not targets & left.keys()}:
        left = {room: targets for room, targets in left.items() if room not in leaves}
    assert not {
        ".".join(room): sorted(".".join(each) for each in targets & left.keys()) for room, targets in left.items()
    }


def test_rooms_stay_small():
    # The command has one file for each verb.
    counts = Counter(path.parent.relative_to(ROOT) for path in sources())
    assert not {str(room): count for room, count in counts.items() if count > LARGEST_ROOM}


def test_each_room_has_its_folder_of_tests_and_each_folder_its_room():
    rooms = {path.parent.relative_to(ROOT) for path in sources() if path.parent.parent != ROOT}
    tested = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert rooms <= tested
    assert {
        folder for folder in tested if folder.parts[:1] and folder.parts[0] in FLOORS and len(folder.parts) > 1
    } <= rooms


def test_files_and_functions_stay_short():
    long_files = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert not long_files
    long_functions = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                statements = node.body[1:] if ast.get_docstring(node) else node.body
                length = (node.end_lineno or 0) - statements[0].lineno + 1 if statements else 0
                if length > LONGEST_FUNCTION:
                    long_functions[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert not long_functions


def test_public_functions_and_classes_have_docstrings():
    missing = [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in sources()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


def test_docstrings_begin_with_the_noun():
    asking = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and re.match(r"(What|How|Which|Where|When|Whose?|Why)\b", text := ast.get_docstring(node) or "")
    ]
    assert not asking


def test_a_name_has_one_home():
    """A reader who searches for a class or a function finds one; every script has a `main`."""
    homes: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and node.name != "main":
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    assert not shared


def test_every_package_directory_is_distributed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {"shardwright"} | {
        ".".join(("shardwright", *path.parent.relative_to(ROOT).parts))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert listed == found


def test_no_machine_paths_and_no_shell_strings():
    forbidden = re.compile(r"/(?:work|root|farm)/|shell=True|weights_only=False|trust_remote_code=True")
    for path in sources():
        match = forbidden.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path}: {match and match[0]}"
