"""`python -m bench run` measures, `python -m bench report` makes README's tables and pictures of committed results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.suites import DIRECTIONS, DTYPES, OPS, SUITES, grid, parse_sizes, suite


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True)

    suites = "; ".join(f"{name}: {what}" for name, (_, what) in SUITES.items())
    run = commands.add_parser(
        "run",
        help="measure, and write JSON lines",
        description="Kernel time (L2 cold, host excluded) and host time of every provider, each result checked first.",
    )
    run.add_argument("--suite", choices=SUITES, help=f"a set of cases instead of those below. {suites}")
    run.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    run.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    run.add_argument("--dtype", nargs="+", choices=DTYPES, help="of x, weight and bias; bf16 without --suite")
    run.add_argument("--cols", nargs="+", default=["4096"], metavar="N", help="row lengths, or a:b for doublings")
    run.add_argument("--rows", nargs="+", default=[], metavar="N", help="as --cols; else what makes 64 M elements")
    run.add_argument("--providers", nargs="+", metavar="NAME", help="those to measure; else all that can be imported")
    run.add_argument(
        "--triton-tutorial", metavar="FILE", help="your copy of Triton's python/tutorials/05-layer-norm.py"
    )
    run.add_argument("--out", type=Path, metavar="FILE", help="file of JSON lines to write")
    run.set_defaults(command=_run)

    report = commands.add_parser(
        "report",
        help="rebuild README's tables and pictures",
        description="Rebuild the Speed section of README.md and bench/plots from bench/results.",
    )
    report.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    report.set_defaults(command=_report)
    return parser


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import providers, runner
    from bench.tables import summary

    everybody = providers.all_providers(options.triton_tutorial)
    names = [provider.name for provider in everybody]
    unknown = sorted(set(options.providers or ()) - set(names))
    if unknown:
        print(f"bench: providers must be among {names}; got {unknown}.", file=sys.stderr)
        return 2
    try:
        if options.suite:
            dtypes = [DTYPES[dtype] for dtype in options.dtype or DTYPES]
            cases = [
                case
                for case in suite(options.suite)
                if case.op in options.op and case.direction in options.direction and case.dtype in dtypes
            ]
        else:
            dtypes = [DTYPES[dtype] for dtype in options.dtype or ["bf16"]]
            cases = grid(options.op, options.direction, dtypes, parse_sizes(options.cols), parse_sizes(options.rows))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    found, missing = providers.available([p for p in everybody if p.name in (options.providers or names)])
    if not found:
        for name, reason in missing.items():
            print(f"{name}: {reason}", file=sys.stderr)
        print("bench: nobody can be measured here; a GPU and CuPy are needed.", file=sys.stderr)
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=400)
    out = options.out.open("w") if options.out else None
    lines = runner.run(cases, found, missing, out, console)
    if out is not None:
        out.close()
    console.print(summary(lines))
    return 0


def _report(options: argparse.Namespace) -> int:
    from bench.report import report

    return report(check=options.check)


if __name__ == "__main__":
    sys.exit(main())
