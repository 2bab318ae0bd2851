"""`python -m bench run` measures; `python -m bench report` makes tables and pictures of docs/speed.md from results."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from bench.results import OURS, ROOF, case_of, read
from bench.suites import DIRECTIONS, DTYPES, OPS, SUITES, Case, drawn, grid, parse_sizes, suite


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
        description="Kernel time (L2 cold, host excluded) of the roof and of every provider, in turns, each result "
        "checked first.",
    )
    run.add_argument("--suite", choices=SUITES, help=f"a set of cases instead of those below. {suites}")
    run.add_argument("--step", type=int, help="between the numbers of columns of the suite long; default: 12288")
    run.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    run.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    run.add_argument("--dtype", nargs="+", choices=DTYPES, help="of x, weight and bias; bf16 without --suite")
    run.add_argument("--cols", nargs="+", default=["4096"], metavar="N", help="row lengths, or a:b for doublings")
    run.add_argument("--rows", nargs="+", default=[], metavar="N", help="as --cols; default: to make 64 M elements")
    run.add_argument(
        "--providers", nargs="+", metavar="NAME", help="those to measure; default: all that can be imported"
    )
    run.add_argument("--without", nargs="+", default=[], metavar="NAME", help="those not to measure; roof is one too")
    run.add_argument("--sample", type=int, metavar="N", help="N shapes drawn by --seed, with both norms and directions")
    run.add_argument("--seed", type=int, default=0, help="draws the shapes, and the order in which they are measured")
    run.add_argument("--seconds", type=float, metavar="S", help="stop after this many")
    run.add_argument(
        "--peer-seconds", type=float, metavar="S", help="how many one peer may take in all to compile and tune"
    )
    run.add_argument(
        "--triton-tutorial", metavar="FILE", help="your copy of Triton's python/tutorials/05-layer-norm.py"
    )
    run.add_argument("--out", type=Path, metavar="FILE", help="file of JSON lines to write; roofs.json comes beside it")
    run.add_argument("--resume", action="store_true", help="go on with --out: leave out the cases that it has")
    run.set_defaults(command=_run)

    report = commands.add_parser(
        "report",
        help="rebuild the tables of docs/speed.md and the pictures",
        description="Rebuild the tables of docs/speed.md and docs/plots from bench/results, and print the bars.",
    )
    report.add_argument("files", nargs="*", type=Path, help="print bars and losses of these files, and change nothing")
    report.add_argument("--commit", help="whose results to take; needed if bench/results has those of several commits")
    report.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    report.set_defaults(command=_report)
    return parser


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the cases that a run measures, in its order."""
    if options.suite:
        dtypes = [DTYPES[dtype] for dtype in options.dtype or DTYPES]
        cases = [
            case
            for case in suite(options.suite, options.step)
            if case.op in options.op and case.direction in options.direction and case.dtype in dtypes
        ]
    else:
        dtypes = [DTYPES[dtype] for dtype in options.dtype or ["bf16"]]
        cases = grid(options.op, options.direction, dtypes, parse_sizes(options.cols), parse_sizes(options.rows))
    if options.sample is not None or options.seconds is not None:
        cases = drawn(cases, options.sample, options.seed)
    if options.resume and options.out.exists():
        done = {case_of(line) for line in read(options.out)[1:] if line.get("provider") == OURS}
        cases = [case for case in cases if case not in done]
    return cases


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import providers

    everybody = providers.all_providers(options.triton_tutorial)
    names = [provider.name for provider in everybody]
    unknown = sorted((set(options.providers or ()) | set(options.without)) - {*names, ROOF})
    if unknown:
        print(f"bench: providers must be among {[ROOF, *names]}; got {unknown}.", file=sys.stderr)
        return 2
    if options.resume and options.out is None:
        print("bench: --resume needs --out FILE, the file to go on with.", file=sys.stderr)
        return 2
    try:
        cases = cases_of(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    wanted = [p for p in everybody if p.name in (options.providers or names) and p.name not in options.without]
    available, missing = providers.available(wanted)
    if not available:
        for name, reason in missing.items():
            print(f"{name}: {reason}", file=sys.stderr)
        print("bench: nobody can be measured here; a GPU and CuPy are needed.", file=sys.stderr)
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=400)
    return _measured(options, cases, available, missing, console)


def _measured(options, cases, available, missing, console) -> int:
    """Run the cases; after a fault that leaves the GPU unusable, go on in a new process without its provider."""
    from bench.environment import environment, this_commit
    from bench.roofs import Roofs
    from bench.runner import DeviceLostError, Runner

    begun = time.perf_counter()
    deadline = begun + options.seconds if options.seconds is not None else float("inf")
    goes_on = options.resume and options.out.exists()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    out = options.out.open("a" if goes_on else "w") if options.out else None
    for name, reason in missing.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
    runner = Runner(available, out, console, deadline=deadline, peer_seconds=options.peer_seconds or float("inf"))
    if not goes_on:
        versions = {provider.name: version for provider, version in available}
        runner.note(environment(this_commit(), versions, missing))
    if (ours := available[0][0]).name == OURS:
        likely = cases
        if options.seconds is not None:  # only those for which there may be time
            each = sum(provider.seconds for provider, _ in available)
            likely = cases[: int(options.seconds / each) + 4]
        console.print(f"{ours.precompile(likely, deadline)} kernels ready after {time.perf_counter() - begun:.1f} s")
    try:
        if ROOF not in options.without:
            try:
                runner.roofs = Roofs(options.out.parent / "roofs.json" if options.out else None)
            except Exception as error:
                console.print(f"no roofs: {error}", markup=False)
            console.print(f"roofs ready after {time.perf_counter() - begun:.1f} s")
        runner.run(cases)
    except DeviceLostError as broken:
        console.print(str(broken), markup=False)
        if options.out is None:
            return 1
        assert out is not None
        out.close()
        _go_on(options, broken.provider, deadline - time.perf_counter())
    if out is not None:
        out.close()
    _say(options, runner.lines, console)
    return 0


def _say(options: argparse.Namespace, lines: list, console) -> None:
    """Print the bars of a suite, over all that its file holds, or without a suite a table of the cases."""
    from bench.bars import bars
    from bench.report import bars_text
    from bench.results import Results, group
    from bench.tables import summary

    if options.suite:
        measured = group(read(options.out) if options.out else lines, options.suite)
        console.print(bars_text([bar for bar in bars(Results({}, measured)) if bar.cases]), markup=False)
    else:
        console.print(summary(lines))


def _go_on(options: argparse.Namespace, broken: str, seconds: float) -> None:
    """Go on in a new process, without the provider that is broken unless it is ours; the case has its line by now."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"] + ["--resume"]
    without = [*options.without, *([broken] if broken != OURS else [])]
    if without:
        arguments += ["--without", *without]
    if options.seconds is not None:
        arguments += ["--seconds", str(max(0.0, seconds))]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "bench", *arguments])


def _report(options: argparse.Namespace) -> int:
    from bench import report

    if options.files:
        return report.show(options.files)
    return report.report(check=options.check, commit=options.commit)


if __name__ == "__main__":
    sys.exit(main())
