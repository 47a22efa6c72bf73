"""House rules that no single module can keep: imports, public names, and what gets installed."""

from __future__ import annotations

import ast
import json
import os
import re
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import pipegrad
from tests.support.distributions import declared

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipegrad"
HANDLERS = ROOT / "handlers" / "pipegrad_handlers"
CODECS = ROOT / "handlers" / "pipegrad_codecs"
ACME = ROOT / "tests" / "support" / "acme_handlers"
# And the groups of this process, of which torch has no public list.
TORCH_PRIVATE = {PACKAGE / "interop" / "private.py", PACKAGE / "comm" / "ending.py"}

# What runs in a step. A folder may import from itself and from those above it in this list.
# `private` is interop/private.py: it knows no gradient, and gradients need names of it.
CORE = [
    *("_torch_version", "printable", "tables", "errors", "limits", "run_files", "comm"),
    "topology",
    *("plugins", "model", "private", "plan", "gradients", "interop", "losses", "pipeline"),
]
# What stands beside a step: each may import the core too, and what is above it here.
TOOLS = [
    *("checkpoint", "partition", "observe", "train", "audit", "commands", "cli", "__main__"),
]
# Where a product file may read or write what can run code when it is read.
MAY_PICKLE = {
    "testing/ranks.py": "a parent and the ranks that it has started, over a pipe of theirs",
    "testing/plugin_contract.py": "reads what it has written itself, to see whether a value lasts",
    "audit/audit.py": "what ranks have seen goes to rank 0, over torch's groups",
}
FACE_NAMES = 6
# Files of train/ that no training loop needs, and parts that know no training.
NO_LOOP = {
    "process.py": "how the process of a rank begins and ends: a script has its launcher",
    "job.py": "what follows from a configuration without ranks, for `pipegrad plan` too",
    "summary.py": "`pipegrad plan`",
    "rendering.py": "tables of the commands",
}
WORDS_AND_FILES = {"errors", "limits", "plugins", "printable", "run_files", "tables"}
# What the trainer imports beside public names, and why a loop of a user needs none of it.
NOT_OF_A_LOOP = {
    "comm.watch.Bounded": "limits the set-up; that of a script ends with its launcher",
    "comm.activity.failure_of": "tells who fails first when a model is tried out",
    "comm.agreement.nobody_comes": "the same",
    "gradients.norm.in_a_sentence": "words",
    "simulation.timeline.in_time": "words",
    "partition.cut_model.Source": "cut.from_pretrained, with checks of keys between its steps",
    "partition.hf.files.extra": "the same",
    "partition.hf.pretrained.meta_model": "the same",
}


def may_import() -> dict[str, set[str]]:
    """Returns for each part of pipegrad the parts that it may import from.

    The core, with schedules and testing, imports no tool.
    """
    order = [*CORE, *TOOLS]
    table = {part: set(order[: number + 1]) for number, part in enumerate(order)}
    # Schedules are plain data, and plug-ins. What runs them, and what is beside it, knows them.
    table["schedules"] = {"schedules", *CORE[1:6], "plugins"}
    # Tools without torch: they know schedules, and no run.
    table["simulation"] = {*table["schedules"], "simulation"}
    table["picture"] = {*table["simulation"], "picture"}
    # Where torch's runtime puts transfers, torch itself says.
    table["orders"] = {*table["picture"], "private", "orders"}
    table["pipeline"] |= table["schedules"]
    for part in TOOLS:
        table[part] |= table["orders"]
    # The trainer imports what a user imports.
    table["train"] |= {"__init__"}
    # An audit runs in ranks of its own.
    table["audit"] |= {"testing"}
    # What is public is the core's: authors of handlers and codecs test with it.
    table["testing"] = {*CORE, "schedules", "testing", "__init__"}
    # The package itself stands above them all: PIPEGRAD_CHECK_ORDER=1 is read where it is imported.
    return table | {"__init__": {*order, *table["orders"], "testing"}}


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (full dotted name, name it is bound to) for every import, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path) -> set[str]:
    """Returns the modules of pipegrad that a file imports at once, not inside of a function."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipegrad"):
            for alias in node.names:
                full = ROOT / f"{node.module}.{alias.name}".replace(".", "/")
                is_module = full.is_dir() or full.with_suffix(".py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else str(node.module))
    return found


def part_of(dotted: str) -> str:
    """Returns the part of pipegrad that has this name; what the package exports is `__init__`'s."""
    if f"{dotted}.".startswith("pipegrad.interop.private."):
        return "private"
    part = dotted.split(".")[1] if "." in dotted else "__init__"
    exists = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()
    return part if exists else "__init__"


def is_private(dotted: str) -> bool:
    return any(p.startswith("_") and not p.endswith("__") for p in dotted.split("."))


def pickles(path: Path) -> set[str]:
    """Returns what a file uses that may run code when something is read."""
    modules = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = {name.partition(".")[0] for name, _ in imports(path)} & modules
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {o.arg: ast.unparse(o.value) for o in node.keywords}
            is_loose = name == "torch.load" and options.get("weights_only") != "True"
            is_loose |= options.get("allow_pickle") == "True"
            if is_loose or name in ("eval", "exec") or re.search(r"_object(_list)?$", name):
                found.add(name)
    return found


def private_torch_names(path: Path) -> set[str]:
    """Returns the private names of torch that a file imports, or reaches by dots alone."""
    found = [(name, bound) for name, bound in imports(path) if name.split(".")[0] == "torch"]
    bound_to_torch = {bound for _, bound in found}
    nodes = ast.walk(ast.parse(path.read_text()))
    dotted = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    reached = {
        name
        for name in dotted
        if name.replace(".", "").isidentifier() and name.split(".")[0] in bound_to_torch
    }
    # torch documents its operators over lists of tensors, whose names begin so.
    names = reached | {name for name, _ in found}
    return {n for n in names if is_private(n) and not n.startswith("torch._foreach_")}


def test_nothing_that_may_run_code_is_read_but_where_a_reason_says_why() -> None:
    """A pickle of another process runs what that process likes."""
    files = sources(PACKAGE, HANDLERS, CODECS, ROOT / "examples")
    found = [str(path.relative_to(ROOT)) for path in files if pickles(path)]
    assert found == [f"pipegrad/{path}" for path in sorted(MAY_PICKLE)]


def test_imports_run_one_way() -> None:
    table = may_import()
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(PACKAGE)
        for name, _ in imports(path)
        if name.split(".")[0] == "pipegrad"
        if part_of(name) not in table[part_of(module_name(path))]
    ]
    assert wrong == []


def test_imports_make_no_cycle() -> None:
    graph = {module_name(path): imported_modules(path) for path in sources(PACKAGE)}
    done, cycles = set[str](), []

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            cycles.append([*way[way.index(module) :], module])
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, [*way, module])
            done.add(module)

    for module in sorted(set(graph) - {"pipegrad"}):
        visit(module, [])
    assert cycles == []


@pytest.mark.parametrize("folder", ["plan", "schedules"])
def test_plans_and_schedules_are_plain_data(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(PACKAGE / folder)
        for name, _ in imports(path)
        if name.startswith("torch.distributed")
    ]
    assert wrong == []


def test_every_folder_says_what_it_answers() -> None:
    for folder in sorted({path.parent for path in sources(PACKAGE)} - {PACKAGE}):
        face = ast.parse((folder / "__init__.py").read_text())
        names = [
            name for node in face.body if isinstance(node, ast.ImportFrom) for name in node.names
        ]
        assert ast.get_docstring(face), folder
        assert len(names) <= FACE_NAMES or folder.name in {"schedules", "testing"}, folder


@pytest.mark.parametrize(("folder", "contract"), [(HANDLERS, "handler"), (CODECS, "codec")])
def test_built_in_plug_ins_use_public_names_only(folder: Path, contract: str) -> None:
    """The contract is public too: it has the names of its annotations."""
    contract = f"pipegrad.plugins.{contract}"
    public = {"pipegrad", *(f"pipegrad.{name}" for name in pipegrad.__all__)}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name, _ in imports(path)
        if name.split(".")[0] == "pipegrad" and name not in public and not name.startswith(contract)
    ]
    assert wrong == []


def documented() -> set[str]:
    """Returns what the reference shows, and what the package exports, also by the homes of that."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.rst"))
    homes = {f"pipegrad.{module}.{name}" for name, module in pipegrad._HOME_OF.items()}
    exported = {f"pipegrad.{name}" for name in pipegrad.__all__}
    return homes | exported | {*re.findall(r"^\.\. auto\w+:: (pipegrad\S*)", pages, re.MULTILINE)}


def test_the_trainer_is_a_user_of_the_public_api() -> None:
    """A team with a loop of its own copies train/loop.py: it finds there what it can import."""
    public, found = documented(), set[str]()
    for path in sources(PACKAGE / "train"):
        for name, _ in imports(path) if path.name not in NO_LOOP else ():
            is_ours = name.split(".")[0] == "pipegrad" and part_of(name) != "train"
            inside = name.removeprefix("pipegrad.").split(".")[0]
            if is_ours and inside not in {*WORDS_AND_FILES, *pipegrad._FOLDERS}:
                found |= {name} - public
    assert {name.removeprefix("pipegrad.") for name in found} == {*NOT_OF_A_LOOP}
    assert {*NO_LOOP} <= {path.name for path in sources(PACKAGE / "train")}


def test_private_names_of_torch_are_where_they_are_known_to_be() -> None:
    used = {path: private_torch_names(path) for path in sources(PACKAGE, HANDLERS, CODECS)}
    assert {path for path, names in used.items() if names} == TORCH_PRIVATE


def test_a_cut_knows_neither_hugging_face_nor_what_stands_on_top_of_both() -> None:
    for folder, known in {"cutting": {"cutting"}, "hf": {"cutting", "hf"}}.items():
        names = {
            name for path in sources(PACKAGE / "partition" / folder) for name, _ in imports(path)
        }
        inside = {name.split(".")[2] for name in names if name.startswith("pipegrad.partition.")}
        assert inside <= known, folder


def test_tables_of_hooks_are_read_where_private_names_are_and_where_modules_are_copied() -> None:
    tables = {name for name in vars(nn.Module()) if "hook" in name}
    tables |= {"_post_accumulate_grad_hooks", "hooks_dict_ref"}  # those of a tensor
    found = {
        "partition" if "partition" in path.parts else str(path.relative_to(PACKAGE))
        for path in sources(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in tables
    }
    assert found == {"interop/private.py", "partition"}


def test_streams_and_events_are_touched_by_sites_alone() -> None:
    """Else the mutation gate would not know of a wait, nor the checker of an edge."""
    verbs = {"current_stream", "record_event", "wait_event", "wait_stream", "record_stream"}
    verbs |= {"synchronize", "Stream", "Event"}
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in sources(PACKAGE, HANDLERS, CODECS)
        if "testing" not in path.parts and path.name != "sync_points.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in verbs
    }
    assert found == set()


def test_all_names_what_is_public() -> None:
    public = {
        name
        for name, found in vars(pipegrad).items()
        if not name.startswith("_") and not isinstance(found, ModuleType)
    }
    assert pipegrad.__all__ == sorted(set(pipegrad.__all__))
    assert public <= set(pipegrad.__all__)
    assert [name for name in pipegrad.__all__ if not hasattr(pipegrad, name)] == []
    assert dir(pipegrad) == pipegrad.__all__


def test_public_names_are_what_type_checkers_see() -> None:
    face = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in face.body if isinstance(node, ast.If))
    static = {
        alias.name: str(node.module).removeprefix("pipegrad.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert [static.pop(name) for name in pipegrad._FOLDERS] == ["pipegrad"] * 5
    assert static == pipegrad._HOME_OF
    assert {*static, *pipegrad._FOLDERS} == set(pipegrad.__all__)


HEAVY = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining"]
LIGHT = """
import json, sys
{statement}
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import pipegrad, pipegrad.cli, pipegrad.schedules", ["torch", *HEAVY]),
        ("from pipegrad import GradientSync, Scheduler, Bucketer, Topology", HEAVY),
    ],
)
def test_imports_are_light(statement: str, heavy: list[str]) -> None:
    """Issue 17: `pipegrad --help` took 3 s, and an import 1.7 s beside torch's own."""
    script = LIGHT.format(statement=statement, heavy=heavy)
    assert json.loads(run(sys.executable, "-c", script, cwd=ROOT)) == []


def test_the_installed_entry_points_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"] | {"console_scripts": project["scripts"]}
    installed: dict[str, dict[str, str]] = {}
    for entry in metadata.distribution("pipegrad").entry_points:
        installed.setdefault(entry.group, {})[entry.name] = entry.value

    assert installed == declared, "entry points changed: install pipegrad again"


# --- a third party's handler, from its sources to a user's environment

LIST = """
import json, sys
from pipegrad import handlers
found = [[p.name, p.value, p.distribution, p.version] for p in handlers]
imported = [module for module in sys.modules if module.startswith(("acme", "pipegrad_handlers"))]
print(json.dumps({"plugins": found, "imported": imported}))
"""

USE = """
import json, torch, pipegrad
record = pipegrad.ParameterRecord(
    key="0.w", name="w", stage=0, shape=(2,), dtype=torch.float32, requires_grad=True,
    holders=(0,), position=0,
)
topology = pipegrad.Topology.build(axes=[("pp", 1), ("dp", 2)])
resolved = pipegrad.handlers.resolve({"name": "acme-sum", "axis": "dp"})
reductions = resolved.plugin.reductions([record], topology)
print(json.dumps({
    "identity": resolved.identity,
    "reductions": [[r.record.key, r.ranks, r.op] for r in reductions],
    "file": pipegrad.__file__,
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments: str | Path, cwd: Path) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheels of acme-handlers and of pipegrad."""
    folder = tmp_path_factory.mktemp("wheels")
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    pip("wheel", *offline, "--wheel-dir", folder, ROOT, ACME, cwd=folder)
    return sorted(folder.iterdir())


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a fresh environment that has what this one has, except pipegrad."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    shared = tmp_path / "shared"
    shared.mkdir()
    for folder in map(Path, site.getsitepackages()):
        for path in folder.iterdir() if folder.is_dir() else ():
            if "pipegrad" not in path.name and not (shared / path.name).exists():
                (shared / path.name).symlink_to(path)
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=ROOT)
    Path(purelib.strip(), "shared.pth").write_text(f"{shared}{os.linesep}")
    return python


def test_the_wheel_holds_the_typed_packages(wheels: list[Path]) -> None:
    wheel = next(path for path in wheels if path.name.startswith("pipegrad-"))
    names = zipfile.ZipFile(wheel).namelist()

    folders = {name.split("/")[0] for name in names}
    packages = {"pipegrad", "pipegrad_codecs", "pipegrad_handlers", "pipegrad_pytest"}
    assert folders == {*packages, wheel.name.split("-py3")[0] + ".dist-info"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    page = {path.relative_to(ROOT).as_posix() for path in (PACKAGE / "picture/page").iterdir()}
    assert page <= set(names)


def test_somebody_elses_handler_is_installed_listed_used_and_uninstalled(
    wheels: list[Path], python: Path, tmp_path: Path
) -> None:
    pip("--python", python, "install", "--no-index", *wheels, cwd=tmp_path)
    version = metadata.version("pipegrad")
    ours = [[*plugin, "pipegrad", version] for plugin in declared("pipegrad.handlers").items()]
    theirs = ["acme-sum", "acme_handlers:AcmeSum", "acme-handlers", "2.5"]

    listed = json.loads(run(python, "-I", "-c", LIST, cwd=tmp_path))
    assert listed == {"plugins": [theirs, *ours], "imported": []}

    used = json.loads(run(python, "-I", "-c", USE, cwd=tmp_path))
    assert Path(used.pop("file")).is_relative_to(tmp_path)
    assert used == {
        "identity": [*theirs, [["axis", "'dp'"]]],
        "reductions": [["0.w", [0, 1], "sum"]],
    }

    pip("--python", python, "uninstall", "--yes", "acme-handlers", cwd=tmp_path)
    listed = json.loads(run(python, "-I", "-c", LIST, cwd=tmp_path))
    assert listed == {"plugins": ours, "imported": []}


def test_actions_are_pinned_by_digest_and_may_only_read() -> None:
    """Security, F10. A tag can be moved to other code, which would have had all rights."""
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text()
        used = re.findall(r"uses: \S+@(\S+)", text)
        assert used, workflow
        assert [digest for digest in used if not re.fullmatch("[0-9a-f]{40}", digest)] == []
        assert "\npermissions:\n  contents: read\n" in text


# --- nothing lies about

AT_THE_ROOT = {
    *(".ci", ".github", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
    *("benchmarks", "constraints.txt", "docs", "examples", "handlers", "pipegrad"),
    *("pyproject.toml", "scripts", "tests"),
}
PAGES = re.compile(r"(docs/.*|examples/.*|benchmarks/.*|tests/.*|[A-Z]+)\.(md|rst)")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files that git knows, by their path from the root."""
    listed = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    return [name for name in listed if name and (ROOT / name).exists()]


def test_the_root_has_sixteen_names(tracked: list[str]) -> None:
    assert {name.partition("/")[0] for name in tracked} == AT_THE_ROOT


def test_every_picture_example_and_script_is_on_a_page(tracked: list[str]) -> None:
    text = "\n".join((ROOT / name).read_text() for name in tracked if PAGES.fullmatch(name))
    shown = re.compile(r"docs/((pictures|drawings)/)?[^/]+\.(svg|png)|examples/.*|scripts/[^/]+")
    assert [n for n in tracked if shown.fullmatch(n) and Path(n).name not in text] == []


def test_every_benchmark_has_a_page_that_names_its_scripts(tracked: list[str]) -> None:
    numbers = (ROOT / "docs" / "numbers.md").read_text()
    for folder in sorted({Path(name).parent for name in tracked if name.startswith("benchmarks/")}):
        files = {name: (ROOT / name).read_text() for name in tracked if Path(name).parent == folder}
        page = str(folder / "README.md")
        assert page in numbers, page
        for name in files.keys() - {page}:
            imported = rf"^\s*(from|import) (\S+\.)?{Path(name).stem}\b"
            users = [n for n, text in files.items() if re.search(imported, text, re.MULTILINE)]
            assert Path(name).name in files[page] or set(users) - {name}, name
