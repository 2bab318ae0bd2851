"""A block's forward, rewritten so that a sum and the norm beside it are one call.

What the method computes is read from its source, and these forms of statements are joined:

    a = b + c; r = a; a = self.norm(a)   ->   normed, a = self._sum_norm("norm", b, c); r = a; a = normed
    a = self.norm(b + c)                 ->   a, _ = self._sum_norm("norm", b, c)
    a = self.norm(b); a = r + a          ->   a = self._norm_sum("norm", b, r)
    a = self.norm(b) * (1 + c) + d       ->   a = self._norm_modulate("norm", b, c, d)
    a = g * a; s = r + a; n = self.norm(s) * (1 + c) + d
                                         ->   n, s = self._gate_sum_norm_modulate("norm", a, g, r, c, d)

The last of these also where `if` statements stand before n, if their tests can be made before the sum: if one of them
holds, all statements are the original's.

The rest of the method stays as it is. What the calls do is decided when they run (blocks.py): a rewritten method whose
norm has a hook computes what stands beside it and calls the norm, as the original does.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from .settle import Settle

SUM_FIRST = "the sum before it"
SUM_AFTER = "the sum after it"
MODULATED = "the modulation after it"
GATED = "the gated sum before it and the modulation after it"
METHODS = {
    SUM_FIRST: "_sum_norm",
    SUM_AFTER: "_norm_sum",
    MODULATED: "_norm_modulate",
    GATED: "_gate_sum_norm_modulate",
}
Joins = dict[str, str]  # name of a norm, an attribute of the block: one of METHODS
Settled = tuple[tuple[str, Any], ...]  # attributes of the block and their values
Found = tuple[list[ast.stmt], list[ast.stmt]]  # what replaces the first statements, and those after them


def rewritten(forward: Callable, joins: Joins, settled: Settled = ()) -> FunctionType | None:
    """`forward` with these norms joined, each at least once, and no others; None if it is another method.

    It is for instances whose attributes `settled` have these values.
    """
    if not isinstance(forward, FunctionType) or forward.__closure__ or hasattr(forward, "__wrapped__"):
        return None
    try:
        # The whole file: what a module imports decides how Python compiles calls in it.
        tree = ast.parse("".join(inspect.findsource(forward)[0]))
    except (OSError, SyntaxError):
        return None
    # What stands in the file must be what runs: it may have changed since it was imported.
    definition = _definition(tree, forward)
    if definition is None or _compiled(tree, forward) != forward.__code__:
        return None
    instance = definition.args.args[0].arg
    if settled:
        definition = Settle(instance, dict(settled)).visit(definition)
    writer = _Writer(instance, joins)
    definition.body = writer.statements(definition.body)
    code = _compiled(ast.fix_missing_locations(tree), forward)
    return _function(code, forward) if code is not None and writer.joined == joins else None


def _definition(tree: ast.Module, forward: FunctionType) -> ast.FunctionDef | None:
    place = forward.__name__, forward.__code__.co_firstlineno
    found = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and (one.name, one.lineno) == place]
    return found[0] if len(found) == 1 and found[0].args.args and not found[0].decorator_list else None


def _compiled(tree: ast.Module, forward: FunctionType) -> CodeType | None:
    """The code of `forward` in a file."""
    place = forward.__name__, forward.__code__.co_firstlineno
    left = [compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        if (code.co_name, code.co_firstlineno) == place:
            return code
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
    return None


def _function(code: CodeType, forward: FunctionType) -> FunctionType:
    """With the globals of the original, so that what is replaced in its module is replaced here."""
    function = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
    function.__kwdefaults__ = forward.__kwdefaults__
    function.__annotations__ = dict(forward.__annotations__)
    function.__doc__, function.__module__ = forward.__doc__, forward.__module__
    function.__qualname__ = forward.__qualname__
    return function


class _Writer:
    """Joins what it may; `joined` says what it found."""

    def __init__(self, instance: str, joins: Joins):
        self.instance = instance  # the method's name for it, self
        self.joins = joins
        self.joined: Joins = {}
        self.count = 0

    def statements(self, given: list[ast.stmt], after: Iterable[ast.stmt] = ()) -> list[ast.stmt]:
        """A list of statements that run one after the other, and `after` after them."""
        written: list[ast.stmt] = []
        left = list(given)
        while left:
            found = (
                self._sum_then_norm(left)
                or self._distributed(left, after)
                or self._norm_then_sum(left)
                or self._norm_then_modulation(left)
                or self._gated_sum_then_modulation(left, after)
            )
            if found is not None:
                replaced, left = found
                written += replaced
                continue
            statement = left.pop(0)
            if isinstance(statement, ast.If):
                statement.body = self.statements(statement.body, (*left, *after))
                statement.orelse = self.statements(statement.orelse, (*left, *after))
            else:
                self._norm_of_sum(statement)
            written.append(statement)
        return written

    def _sum_then_norm(self, left: list[ast.stmt]) -> Found | None:
        """a = b + c, names for a, and a statement that computes the norm of a."""
        match left[0]:
            case ast.Assign([ast.Name(total)], ast.BinOp(b, ast.Add(), c)):
                place = 1
            case _:
                return None
        while place < len(left) and _names(left[place], total):
            place += 1
        if place == len(left) or not isinstance(left[place], ast.Assign | ast.Return | ast.Expr):
            return None
        calls = [(call, name) for call in _evaluated(left[place]) if (name := self._norm_of(call, total, SUM_FIRST))]
        if len(calls) != 1:
            return None
        ((call, name),) = calls
        normed = f"_normed_by_{name}"
        joined = self._call(SUM_FIRST, name, b, c, like=left[0])
        targets = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(total, ast.Store())], ast.Store())
        first = ast.copy_location(ast.Assign([targets], joined), left[0])
        reader = _Replace(call, ast.Name(normed, ast.Load())).visit(left[place])
        return [first, *left[1:place]], [reader, *left[place + 1 :]]

    def _distributed(self, left: list[ast.stmt], after: Iterable[ast.stmt]) -> Found | None:
        """a = b + c; if d is not None: ...; rest   as   if d is not None: a = b + c; ...; rest   else: a = b + c; rest

        if the norm of a follows in either.
        """
        match left[:2]:
            case [
                ast.Assign([ast.Name(total)], ast.BinOp(_, ast.Add(), _)),
                ast.If(ast.Compare(ast.Name(tested), [ast.IsNot()], [ast.Constant(None)]) as test, body, []) as branch,
            ] if tested != total and not _walrus(left[0]):
                ways = [[left[0], *body, *left[2:]], [left[0], *left[2:]]]
            case _:
                return None
        before = self.count
        inside, without = (self.statements(copy.deepcopy(way), after) for way in ways)
        if self.count == before:
            return None
        return [ast.copy_location(ast.If(test, inside, without), branch)], []

    def _norm_then_sum(self, left: list[ast.stmt]) -> Found | None:
        """a = norm(b); a = r + a"""
        match left[:2]:
            case [
                ast.Assign([ast.Name(normed)], ast.Call() as call),
                ast.Assign([ast.Name(total)], ast.BinOp(ast.Name(one), ast.Add(), ast.Name(other))),
            ] if total == normed and (one == normed) != (other == normed):
                name = self._norm_of(call, None, SUM_AFTER)
            case _:
                return None
        if name is None:
            return None
        residual = ast.Name(other if one == normed else one, ast.Load())
        joined = self._call(SUM_AFTER, name, call.args[0], residual, like=left[0])
        target = ast.Name(total, ast.Store())
        return [ast.copy_location(ast.Assign([target], joined), left[0])], left[2:]

    def _norm_then_modulation(self, left: list[ast.stmt]) -> Found | None:
        found = self._modulation(left, MODULATED)
        if found is None:
            return None
        joined = self._call(MODULATED, found.name, found.argument, found.scale, found.shift, like=left[0])
        target = ast.Name(found.target, ast.Store())
        return [ast.copy_location(ast.Assign([target], joined), left[0])], left[found.count :]

    def _gated_sum_then_modulation(self, left: list[ast.stmt], after: Iterable[ast.stmt]) -> Found | None:
        """a = gate * a; s = r + a; the modulated norm of s: a is then not what it was, and must not be read again."""
        match left[:2]:
            case [
                ast.Assign([ast.Name(gated)], ast.BinOp(gate, ast.Mult(), ast.Name(x))),
                ast.Assign([ast.Name(total)], ast.BinOp(ast.Name(one), ast.Add(), ast.Name(other))),
            ] if gated == x != total and (one == gated) != (other == gated):
                residual = other if one == gated else one
            case _:
                return None
        ifs = list(itertools.takewhile(lambda statement: isinstance(statement, ast.If), left[2:]))
        found = self._modulation(left[2 + len(ifs) :], GATED)
        if found is None or found.argument.id != total or not _is_vector(gate):
            return None
        count = 2 + len(ifs) + found.count
        changed = {gated, total}
        if any(_reads(part, changed) for part in (gate, found.scale, found.shift)) or found.target in changed:
            return None
        if any(_reads(statement, {gated}) for statement in (*left[count:], *after)):
            return None
        summands = (ast.Name(gated, ast.Load()), gate, ast.Name(residual, ast.Load()))
        tests = [self._before_the_sum(branch, total, gated, summands) for branch in ifs]
        if None in tests:
            return None
        joined = self._call(GATED, found.name, *summands, found.scale, found.shift, like=left[0])
        targets = ast.Tuple([ast.Name(found.target, ast.Store()), ast.Name(total, ast.Store())], ast.Store())
        call: ast.stmt = ast.copy_location(ast.Assign([targets], joined), left[0])
        if ifs:
            call = ast.copy_location(ast.If(ast.BoolOp(ast.Or(), tests), left[:count], [call]), left[0])
        return [call], left[count:]

    def _before_the_sum(
        self, branch: ast.stmt, total: str, gated: str, summands: Sequence[ast.expr]
    ) -> ast.expr | None:
        """A test that holds if that of a branch, which stands behind a sum, will hold; None if there is none."""
        match branch:
            case ast.If(ast.Compare(value, [ast.IsNot()], [ast.Constant(None)]) as test, _, []):
                match value:
                    case ast.Name(name) if name not in (total, gated):
                        return test
                    case ast.Attribute(ast.Name(self.instance)):
                        return test
            case ast.If(
                ast.Compare(ast.Attribute(ast.Name(name), "ndim"), [ast.Eq()], [ast.Constant() as ndim]), _, []
            ):
                if name == total:  # which has as many axes as one of its parts
                    ndims = [ast.Attribute(one, "ndim", ast.Load()) for one in summands]
                    return ast.Compare(ndim, [ast.In()], [ast.Tuple(ndims, ast.Load())])
        return None

    def _modulation(self, left: list[ast.stmt], join: str) -> _Modulation | None:
        """n = norm(b) * (1 + scale) + shift, in one statement or n = norm(b) and the rest in two."""
        match left[:2]:
            case [
                ast.Assign(
                    [ast.Name(target)], ast.BinOp(ast.BinOp(ast.Call() as call, ast.Mult(), factor), ast.Add(), shift)
                ),
                *_,
            ]:
                count = 1
            case [
                ast.Assign([ast.Name(target)], ast.Call() as call),
                ast.Assign(
                    [ast.Name(again)], ast.BinOp(ast.BinOp(ast.Name(normed), ast.Mult(), factor), ast.Add(), shift)
                ),
            ] if again == normed == target:
                count = 2
            case _:
                return None
        name, scale = self._norm_of(call, None, join), _scale(factor)
        if name is None or scale is None or not isinstance(call.args[0], ast.Name) or not _is_vector(shift):
            return None
        if count == 2 and (_reads(scale, {target}) or _reads(shift, {target})):
            return None
        return _Modulation(name, call.args[0], target, scale, shift, count)

    def _norm_of_sum(self, statement: ast.stmt) -> None:
        """norm(b + c), in place."""
        for call in _evaluated(statement):
            name = self._norm_of(call, None, SUM_FIRST)
            match call.args:
                case [ast.BinOp(b, ast.Add(), c)] if name is not None:
                    pair = self._call(SUM_FIRST, name, b, c, like=call)
                    first = ast.copy_location(ast.Subscript(pair, ast.Constant(0), ast.Load()), call)
                    _Replace(call, first).visit(statement)

    def _norm_of(self, call: ast.Call, argument: str | None, join: str) -> str | None:
        """The name of a norm that is to be joined so, if it is what is called, of `argument` alone."""
        match call:
            case ast.Call(ast.Attribute(ast.Name(self.instance), name), [given], []) if self.joins.get(name) == join:
                return name if argument is None or (isinstance(given, ast.Name) and given.id == argument) else None
        return None

    def _call(self, join: str, name: str, *arguments: ast.expr, like: ast.AST) -> ast.Call:
        self.joined[name] = join
        self.count += 1
        function = ast.Attribute(ast.Name(self.instance, ast.Load()), METHODS[join], ast.Load())
        return ast.copy_location(ast.Call(function, [ast.Constant(name), *arguments], []), like)


class _Modulation(NamedTuple):
    name: str  # of the norm
    argument: ast.Name
    target: str
    scale: ast.expr
    shift: ast.expr
    count: int  # of statements


def _scale(factor: ast.expr) -> ast.expr | None:
    """s of 1 + s; s[...] of (1 + s)[...]"""
    match factor:
        case ast.BinOp(ast.Constant(1), ast.Add(), scale) if _is_vector(scale):
            return scale
        case ast.Subscript(ast.BinOp(ast.Constant(1), ast.Add(), scale), place):
            found = ast.copy_location(ast.Subscript(scale, place, ast.Load()), factor)
            return found if _is_vector(found) else None
    return None


def _is_vector(node: ast.expr) -> bool:
    """A name, or a view of one, that may be taken sooner or later without a difference."""
    match node:
        case ast.Name():
            return True
        case ast.Subscript(value, place):
            constant = (ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
            return _is_vector(value) and all(isinstance(one, constant) for one in ast.walk(place))
        case ast.Call(ast.Attribute(value, "unsqueeze"), [ast.Constant()], []):
            return _is_vector(value)
    return False


def _reads(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(node))


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node):
        return ast.copy_location(self.new, node) if node is self.old else super().generic_visit(node)


def _names(statement: ast.stmt, value: str) -> bool:
    """b = value, of which value is still what it was."""
    match statement:
        case ast.Assign([ast.Name(target)], ast.Name(id)):
            return id == value and target != value
    return False


_PERHAPS = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _evaluated(statement: ast.stmt) -> list[ast.Call]:
    """The calls of a statement without others inside it, of what is evaluated once and for certain."""
    if not isinstance(statement, ast.Assign | ast.Return | ast.Expr) or statement.value is None or _walrus(statement):
        return []
    calls: list[ast.Call] = []
    left: list[ast.AST] = [statement.value]
    while left:
        node = left.pop()
        if isinstance(node, _PERHAPS):
            continue
        if isinstance(node, ast.Call):
            calls.append(node)
        left += ast.iter_child_nodes(node)
    return calls


def _walrus(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement))
