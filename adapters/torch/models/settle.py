"""A method with some attributes of its instance known: what they decide is decided, and ways not taken are dropped."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


class Settle(ast.NodeTransformer):
    """`if` statements that test known attributes alone, such as self.kind == "a", become one of their ways."""

    def __init__(self, instance: str, known: Mapping[str, Any]):
        self.instance = instance  # the method's name for it, self
        self.known = known

    def visit_If(self, node: ast.If) -> Any:
        outcome = self._outcome(node.test)
        if outcome is None:
            return self.generic_visit(node)
        way = node.body if outcome else node.orelse
        left = [self.visit(statement) for statement in way]
        return [one for some in left for one in (some if isinstance(some, list) else [some])]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == []:
            node.body = [ast.Pass()]
        return node

    def _outcome(self, test: ast.expr) -> bool | None:
        """None where a test does not hang on known attributes alone."""
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                outcome = self._outcome(operand)
                return None if outcome is None else not outcome
            case ast.Attribute(ast.Name(self.instance), name) if name in self.known:
                return bool(self.known[name])
            case ast.Compare(ast.Attribute(ast.Name(self.instance), name), [ast.Eq()], [ast.Constant(value)]) if (
                name in self.known
            ):
                return self.known[name] == value
            case ast.Compare(ast.Attribute(ast.Name(self.instance), name), [ast.In()], [ast.List(elements)]) if (
                name in self.known and all(isinstance(one, ast.Constant) for one in elements)
            ):
                return self.known[name] in [one.value for one in elements]
        return None
