"""Mutants: edits of the product, each of one spot, and samples of them."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Mutant = dict[str, Any]
Edit = tuple[str, int, int, str]  # kind, start and end in bytes of the file, new text

_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+",
    "*": "//", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&",
    "<<": ">>", ">>": "<<",
}  # fmt: skip
_KINDS = ("comparison", "condition", "arithmetic", "constant", "dropped")
# Names of constants that no result depends on: times, and options that only guard.
_GUARDS = re.compile(r"(?i)second|timeout|grace|limit|wait|interval|deadline|stacklevel|strict")
_OPERATOR = re.compile(r"is not|not in|[<>=!]=|<<|>>|//|\*\*|[<>+\-*/%&|]|\b(is|in|and|or)\b")
_UNSEEN = {"debug", "info", "cast", "TypeVar", "ParamSpec"}  # calls that no result depends on


class Edits(ast.NodeVisitor):
    """Collects the edits of a file. What is no behaviour is left out: annotations, messages."""

    def __init__(self, source: bytes) -> None:
        self._source, self._found = source, list[Edit]()
        self._starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self._returns_none = [False]

    def of(self, tree: ast.AST) -> list[Edit]:
        """Returns the edits."""
        self.visit(tree)
        return self._found

    def _span(self, node: Any) -> tuple[int, int]:  # noqa: ANN401 - what has a place
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _add(self, kind: str, node: ast.AST, text: str) -> None:
        self._found.append((kind, *self._span(node), text))

    def _operator(self, kind: str, left: ast.AST, right: ast.AST) -> None:
        """Swaps the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._source[start:end].decode()
        match = re.search(
            r"is not|not in|[<>=!]=|<<|>>|//|\*\*|[<>+\-*/%&|]|\b(is|in|and|or)\b", gap
        )
        if match and match[0] in _OPERATORS and "#" not in gap:
            at = start + match.start()
            self._found.append((kind, at, at + len(match[0]), _OPERATORS[match[0]]))

    def _test(self, test: ast.expr) -> None:
        """Negates a condition that is neither a comparison nor a negation: those are others."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.Constant) and not (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        ):
            self._add("condition", test, f"(not ({self._text(test)}))")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self._text(node.test) and "__name__" not in self._text(node.test):
            self._test(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._test(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._test(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._test(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right in itertools.pairwise(operands):
            self._operator("comparison", left, right)
        for operand in operands:
            if isinstance(operand, ast.Constant) and isinstance(operand.value, str):
                self._add("constant", operand, repr(f"{operand.value}x"))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._operator("condition", *node.values[:2])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("condition", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        no_numbers = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
        if not any(
            isinstance(side, no_numbers)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str | None))
            for side in (node.left, node.right)
        ):
            self._operator("arithmetic", node.left, node.right)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._name(node.func) in {"isinstance", "issubclass"}:
            self.visit(node.args[0])  # the other is a type
        elif self._name(node.func) not in _UNSEEN:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self._add("constant", node.slice, repr(f"{node.slice.value}x"))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self._name(node.value.func) not in _UNSEEN:
            self._add("dropped", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        name = self._name(target)
        if self._text(node.value).count(" | ") and not node.col_offset:
            return  # an alias of types
        if isinstance(target, ast.Attribute):
            self._add("dropped", node, "pass")
        if name != "__all__" and not (_GUARDS.search(name) and self._is_number(node.value)):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("dropped", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if self._returns_none[-1] and node.value and self._text(node.value) != "None":
            self._add("dropped", node, "return None")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        is_alias = self._name(node.annotation) == "TypeAlias"
        if node.value and not is_alias and not _GUARDS.search(self._name(node.target)):
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not (node.arg and _GUARDS.search(node.arg) and isinstance(node.value, ast.Constant)):
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in {"__repr__", "__str__"}:
            return
        returns = self._text(node.returns) if node.returns else ""
        self._returns_none.append(bool(re.search(r"\| None$|^None \|", returns)))
        names = [*node.args.posonlyargs, *node.args.args][::-1]
        defaults = [*zip(names, node.args.defaults[::-1], strict=False)]
        defaults += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        for name, default in defaults:
            if default and not _GUARDS.search(name.arg):
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._returns_none.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leaves out messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leaves out what never fails."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leaves out messages: Python 3.11 does not know where their parts are."""

    def visit_arg(self, node: ast.arg) -> None:
        """Leaves out annotations."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    @staticmethod
    def _name(node: ast.AST) -> str:
        return str(getattr(node, "attr", getattr(node, "id", "")))

    @staticmethod
    def _is_number(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant | ast.BinOp)


def folder_of(file: str) -> str:
    """Returns the folder that a file of the product is counted in."""
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] == "pipegrad" and len(parts) > 2 else parts[0]


def sample(count: int, seed: int) -> list[Mutant]:
    """Returns mutants of all folders in proportion to their lines, the kinds evenly."""
    chance, lines = random.Random(seed), Counter[str]()
    edits = defaultdict[str, list[Mutant]](list)
    for path in sorted([*ROOT.glob("pipegrad/**/*.py"), *ROOT.glob("handlers/**/*.py")]):
        source, file = path.read_bytes(), str(path.relative_to(ROOT))
        lines[folder_of(file)] += sum(1 for line in source.splitlines() if line.strip())
        for kind, start, end, text in Edits(source).of(ast.parse(source)):
            line = source.count(b"\n", 0, start)
            code = source.splitlines()[line].strip()
            indented = source.find(code, source.rfind(b"\n", 0, start) + 1)
            edits[folder_of(file)].append({
                "file": file, "line": line + 1, "column": start - indented, "kind": kind,
                "original": source[start:end].decode(), "mutated": text, "code": code.decode(),
            })  # fmt: skip
    shares = {folder: count * number / lines.total() for folder, number in lines.items()}
    numbers = {folder: int(share) for folder, share in shares.items()}
    by_rest = sorted(shares, key=lambda folder: numbers[folder] - shares[folder])
    for folder in by_rest[: count - sum(numbers.values())]:
        numbers[folder] += 1
    chosen = list[Mutant]()
    for folder, number in numbers.items():
        kinds = {kind: [e for e in edits[folder] if e["kind"] == kind] for kind in _KINDS}
        for _ in range(number):
            left = kinds[chance.choice([kind for kind in _KINDS if kinds[kind]])]
            chosen.append(left.pop(chance.randrange(len(left))))
    chance.shuffle(chosen)  # so that any first part of the list is a sample too
    return chosen
