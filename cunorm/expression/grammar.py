"""The parser of expressions' texts, and the names that a text may have. Nothing of a text is ever executed."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable
from typing import NoReturn

from .value import COMPARISONS, DEEPEST, FUNCTIONS, Expression, Graph

_TEMPORARY = re.compile(r"t\d+")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple, if each can be a parameter in Python and a name in a text, and no two are equal."""
    names = tuple(names)
    for name in names:
        if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
            raise ValueError(f"a parameter's name must be an identifier of ASCII letters; got {name!r}")
        if keyword.iskeyword(name) or _TEMPORARY.fullmatch(name):
            raise ValueError(
                f"a parameter's name must not be a keyword of Python nor t0, t1, ..., which texts of expressions have "
                f"themselves; got {name!r}: rename it"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"parameters' names must differ; got {', '.join(names)}")
    return names


_TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<symbol>[<>=!]=|[-+*/<>=(),;])",
    re.ASCII,
)
_SPACE, _PARENTHESIS = re.compile(r"\s*"), re.compile(r"\s*\(")


class _Parser:
    """A recursive-descent parser with a method for each rule of the grammar."""

    def __init__(self, text: str, names: tuple[str, ...]) -> None:
        self.text = text
        self.graph = Graph()
        self.places = {name: self.graph.name(name) for name in names}
        self.depth = 0
        self.position = 0
        self.kind, self.token = "", ""
        self.advance()

    def fail(self, what: str) -> NoReturn:
        raise ValueError(
            f"cunorm: the text of an expression is wrong at position {self.start}: {what}; {self.text!r:.200}. "
            "help(cunorm.expression) has the grammar."
        )

    def advance(self) -> str:
        """Go to the next token, and return the one that was left."""
        left = self.token
        self.start = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        match = _TOKEN.match(self.text, self.start)
        if match:
            self.kind, self.token, self.position = match.lastgroup or "", match[0], match.end()
        elif self.start < len(self.text):
            self.fail("no such symbol")
        else:
            self.kind, self.token = "end", ""
        return left

    def expect(self, symbol: str) -> None:
        if self.token != symbol:
            self.fail(f"{symbol!r} must stand here, not {self.token or 'the end'!r}")
        self.advance()

    def statements(self) -> int:
        """{temporary "=" comparison ";"} comparison"""
        temporaries = 0
        while True:
            temporary = f"t{temporaries}"
            if self.token != temporary:
                break
            self.advance()
            self.expect("=")
            self.places[temporary] = self.comparison()
            self.expect(";")
            temporaries += 1
        result = self.comparison()
        if self.kind != "end":
            self.fail(f"the end must stand here, not {self.token!r}")
        return result

    def comparison(self) -> int:
        """sum [("<" | "<=" | ...) sum]"""
        left = self.sum()
        return self.graph.apply(self.advance(), left, self.sum()) if self.token in COMPARISONS else left

    def sum(self) -> int:
        """product {("+" | "-") product}"""
        left = self.product()
        while self.token in ("+", "-"):
            left = self.graph.apply(self.advance(), left, self.product())
        return left

    def product(self) -> int:
        """unary {("*" | "/") unary}"""
        left = self.unary()
        while self.token in ("*", "/"):
            left = self.graph.apply(self.advance(), left, self.unary())
        return left

    def unary(self) -> int:
        """["-"] atom"""
        if self.token != "-":
            return self.atom()
        self.advance()
        return self.graph.apply("negative", self.atom())

    def atom(self) -> int:
        """number | name | function "(" comparison {"," comparison} ")" | "(" comparison ")" """
        self.depth += 1
        if self.depth > 2 * DEEPEST:
            self.fail("it is nested too deep")
        if self.kind == "number":
            if not math.isfinite(float(self.token)):
                self.fail("a constant must be finite")
            place = self.graph.constant(float(self.advance()))
        elif self.kind == "name":
            place = self.named()
        elif self.token == "(":
            self.advance()
            place = self.comparison()
            self.expect(")")
        else:
            self.fail(f"a number, a name or '(' must stand here, not {self.token or 'the end'!r}")
        self.depth -= 1
        return place

    def named(self) -> int:
        if _PARENTHESIS.match(self.text, self.position):
            if self.token not in FUNCTIONS:
                self.fail(f"there is no function {self.token!r}; there are {', '.join(FUNCTIONS)}")
            function = self.advance()
            arguments = []
            for _ in range(FUNCTIONS[function]):
                self.expect("," if arguments else "(")
                arguments.append(self.comparison())
            self.expect(")")
            return self.graph.apply(function, *arguments)
        if self.token not in self.places:
            self.fail(f"there is no name {self.token!r}; there are {', '.join(self.places)}")
        return self.places[self.advance()]


def parse(text: str, names: Iterable[str]) -> Expression:
    """Return the expression of a text, so that ``parse(e.text, e.names) == e``. Nothing of the text is ever executed.

    Raises
    ------
    ValueError
        If the text does not follow the grammar. The message has the position.

    Examples
    --------
    >>> parse("xhat * (1 + weight)", ["xhat", "weight"]).uses
    ('xhat', 'weight')
    """
    if not isinstance(text, str):
        raise TypeError(f"cunorm: the text of an expression must be str; got {type(text).__name__}.")
    names = check_names(names)
    parser = _Parser(text, names)
    return parser.graph.expression(parser.statements(), names)
