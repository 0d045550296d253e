"""The command line: a table of commands, each of which imports what it needs and calls one noun."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from carry.errors import CarryError, CouldNotRun, UserError
from carry.lock import locked
from carry.paths import House, find_house
from carry.progress import say

_FULL_DISK = ("ENOSPC", "EDQUOT", "EFBIG")
_NO_RIGHT = ("EACCES", "EPERM", "EROFS")
_IN_THE_WAY = ("ENOTDIR", "EEXIST", "EISDIR")  # of build/ and dist/ only: elsewhere that is our bug


class _Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a run as ^C does: scratch removed, children ended."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def _end(number: int, frame: object) -> None:
    raise _Ended(number)


class Command(NamedTuple):
    """`run(house, args)` returns the exit code; `arguments` adds to the parser; `writes` takes the lock."""

    help: str
    run: Callable[[House, argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], None]
    writes: bool = False


def _pins(parser: argparse.ArgumentParser) -> None:
    """The two optional arguments that say which pins; empty strings, as make passes them, mean all."""
    parser.add_argument("--upstream", default="", metavar="NAME")
    parser.add_argument("--version", default="", metavar="VERSION")


def _one_pin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("upstream", metavar="UPSTREAM")
    parser.add_argument("version", metavar="VERSION")


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


def _build_wheels(house: House, args: argparse.Namespace) -> int:
    from carry import index, pins, wheels

    built = wheels.build_all(house, pins.all_pins(house, args.upstream or None, args.version or None))
    index.write_index(wheels.cached_wheels(house, built), house.candidate)
    for wheel in built:
        print(f"{'built    ' if wheel.built else 'unchanged'}  {wheel.path.name}  sha256:{wheel.sha256}")
    return 0


def _apply(house: House, args: argparse.Namespace) -> int:
    from carry import pins, worktree

    print(house.relative(worktree.apply(house, pins.load_pin(house, args.upstream, args.version))))
    return 0


def _refresh(house: House, args: argparse.Namespace) -> int:
    from carry import pins, worktree

    pin = pins.load_pin(house, args.upstream, args.version)
    changed = worktree.refresh(house, pin)
    print("\n".join(house.relative(pin.folder / name) for name in changed) or f"{pin}: nothing changed")
    return 0


def _lint(house: House, args: argparse.Namespace) -> int:
    from carry.lint import lint

    found = lint(house, args.upstream or None, args.version or None)
    print("\n".join([*found, f"lint: {len(found)} finding{'s' * (len(found) != 1)}"]))
    return 1 if found else 0


def _test_tool(house: House, args: argparse.Namespace) -> int:
    from carry.testing import test_tool

    return test_tool(house)


def _test(house: House, args: argparse.Namespace) -> int:
    """Every part runs, whatever the others say; the first that failed gives the exit code."""
    from carry import report

    everything = ["lint", "test-tool", "prove", "matrix-slice", "index", "test-client"]
    codes = {}
    for name in everything:
        codes[name] = main([name])
        if codes[name] > 128:  # interrupted, and so are we
            return codes[name]
    print("\n" + "\n".join(f"{'ok    ' if not code else 'FAILED'}  {name}" for name, code in codes.items()))
    documents = report.proven_here(house)
    if documents:
        print("\n" + report.table(documents))
    return next((code for code in codes.values() if code), 0)


def _leave_one_out(house: House, args: argparse.Namespace) -> int:
    """A line a patch as it is done, then what is not as it should be."""
    from carry import leaveout, pins

    chosen = leaveout.chosen(pins.all_pins(house, args.upstream or None, args.version or None), args.fault)
    found = []
    for pin, faults in chosen:
        results = []
        for one in leaveout.leave_out(house, pin, faults, run=not args.text, whole=args.whole):
            results.append(one)
            print(f"{pin}  {one.line()}", flush=True)
        if args.write:
            print("\n".join(f"written  {house.relative(path)}" for path in leaveout.declare(results)))
        found += [f"{pin}: {finding}" for one in results for finding in one.findings()]
        if not args.text and not args.fault:
            print(f"written  {house.relative(leaveout.write(house, pin, results))}")
    print("\n".join([*found, f"leave-one-out: {len(found)} finding{'s' * (len(found) != 1)}"]))
    return 1 if found else 0


def _left_out(parser: argparse.ArgumentParser) -> None:
    _fault(parser)
    parser.add_argument("--text", action="store_true", help="only whether the others still go on; runs no test")
    parser.add_argument("--write", action="store_true", help="write the `Depends:` trailers that are missing")
    parser.add_argument("--whole", action="store_true", help="run the tests of all others too: hours a pin")


def _built(house: House, args: argparse.Namespace):
    """The pins asked for and their wheels, built where they are not yet, in the candidate index."""
    from carry import index, pins, wheels

    chosen = pins.all_pins(house, args.upstream or None, args.version or None)
    with locked(house.build, f"carry {args.command}", say):
        built = wheels.build_all(house, chosen)
        index.write_index(wheels.cached_wheels(house, built), house.candidate)
    return chosen, built


def _prove(house: House, args: argparse.Namespace) -> int:
    """Both flavours of every pin; a table; the proofs, unless one fault was asked for."""
    from carry import proofs, report

    chosen, built = _built(house, args)
    # a lock of its own: wheels can be built while tests run, but two runs would swap each other's environments
    with locked(house.build / "sites", f"carry {args.command}", say):
        results = proofs.prove(house, chosen, built, getattr(args, "fault", "") or None)
    documents = [result.document for result in results]
    print("\n".join(["", *report.failures(documents), report.table(documents)]))
    for result in results:
        if result.path:
            print(f"{'proven  ' if result.proven else 'UNPROVEN'}  {house.relative(result.path)}")
    return 0 if all(result.proven for result in results) else 1


def _run_matrix(house: House, args: argparse.Namespace, flavours: Sequence[str], select: str, cells: str):
    """One matrix a pin and flavour, and a table of each."""
    from carry import matrix

    chosen, built = _built(house, args)
    with locked(house.build / "sites", f"carry {args.command}", say):
        results = matrix.run(house, chosen, built, flavours, select, cells)
    for result in results:
        print(f"\n{matrix.table(result.document)}\nwritten  {house.relative(result.path)}")
    return results


def _matrix(house: House, args: argparse.Namespace) -> int:
    flavours = [args.flavour] if args.flavour else ["patched"]
    results = _run_matrix(house, args, flavours, "full" if args.command == "matrix-full" else "default", args.cells)
    return 1 if any(result.failed for result in results) else 0


def _matrix_all(house: House, args: argparse.Namespace) -> int:
    from carry.wheels import FLAVOURS

    args.upstream = args.upstream or "deepspeed"
    return 1 if any(result.failed for result in _run_matrix(house, args, FLAVOURS, "default", "")) else 0


def _matrix_slice(house: House, args: argparse.Namespace) -> int:
    from carry import matrix

    args.upstream = args.upstream or "deepspeed"
    results = _run_matrix(house, args, ["patched"], "slice", matrix.slice_patterns(house))
    found = matrix.unknown(house, results)
    print("\n".join([*found, f"matrix-slice: {len(found)} finding{'s' * (len(found) != 1)}"]))
    return 1 if found else 0


def _matrix_diff(house: House, args: argparse.Namespace) -> int:
    from carry import matrix

    changes = matrix.compare(*(matrix.read(Path(name)) for name in (args.before, args.after)))
    print("\n".join(changes.lines()))
    return 1 if changes.worse else 0


def _cells(parser: argparse.ArgumentParser) -> None:
    _pins(parser)
    parser.add_argument("--flavour", default="", metavar="FLAVOUR", help="pristine or patched (the default)")
    parser.add_argument("--cells", default="", metavar="PATTERNS", help="shell patterns on ids, comma-separated")


def _two_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")


def _fault(parser: argparse.ArgumentParser) -> None:
    _pins(parser)
    parser.add_argument("--fault", default="", metavar="ID")


def _index(house: House, args: argparse.Namespace) -> int:
    from carry import pins, publish, report
    from carry.patches import load_series

    chosen = pins.all_pins(house, args.upstream or None, args.version or None)
    patched = [pin for pin in chosen if load_series(pin)]
    report.check_current(house, patched)
    done = publish.publish(house, patched)
    for name in done.added:
        print(f"published  {name}")
    for name in done.kept:
        print(f"kept       {name}")
    return 0


def _serve(house: House, args: argparse.Namespace) -> int:
    from carry.server import serve

    try:
        serve(house.simple, args.port, say)
    except KeyboardInterrupt:
        return 130
    return 0


def _port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8080, metavar="PORT", help="0 takes a free one")


def _bench(house: House, args: argparse.Namespace) -> int:
    from carry.bench import bench
    from carry.measure import table
    from carry.pins import upstream_names

    print(table(bench(house, args.rounds)))
    return _bench_load(house, args) if "deepspeed" in upstream_names(house) else 0


def _bench_load(house: House, args: argparse.Namespace) -> int:
    """The newest pin's loads, or those of the pins asked for; 1 where a patched load costs more than it may."""
    from carry import loadbench

    newest = not args.version
    args.upstream = "deepspeed"
    chosen, built = _built(house, args)
    missed = False
    for pin in chosen[-1:] if newest else chosen:
        with locked(house.build / "sites", f"carry {args.command}", say):
            loads = loadbench.measure(house, pin, built, min(args.rounds, loadbench.ROUNDS))
        print(f"\n{loadbench.table(pin, loads)}")
        missed = missed or not all(load.met for load in loads)
    return 1 if missed else 0


def _rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="slow ones take fewer")
    parser.add_argument(
        "--version", default="", metavar="VERSION", help="whose loads; DeepSpeed's newest pin by default"
    )


def _record(house: House, args: argparse.Namespace) -> int:
    from carry import matrixtable, pins, report

    written = report.record(house, pins.all_pins(house, args.upstream or None, args.version or None))
    written += [path for path in matrixtable.record(house) if path not in written]
    print("\n".join(house.relative(path) for path in written) or "nothing changed")
    return 0


def _bump(house: House, args: argparse.Namespace) -> int:
    from carry import actions, bump, bumpreport

    outcome = bump.bump(house, args.upstream, args.version, args.pin, args.tests)
    print(bumpreport.table(outcome))
    if actions.active():
        print("\n".join(bumpreport.annotations(house, outcome)))
        actions.summary(bumpreport.markdown(house, outcome))
    for path in bumpreport.write(house, outcome):
        print(f"report   {house.relative(path)}")
        actions.output(path.name.replace(".", "_"), house.relative(path))
    if args.write and not outcome.problem:
        print(f"written  {house.relative(bump.write_pin(house, outcome))}")
    return outcome.exit_code


def _bump_arguments(parser: argparse.ArgumentParser) -> None:
    _pins(parser)
    parser.add_argument("--pin", default="", metavar="VERSION", help="the newest below --version by default")
    parser.add_argument("--write", action="store_true", help="lay down the new pin's folder")
    _tests(parser)


def _tests(parser: argparse.ArgumentParser) -> None:
    def number(text: str) -> int | None:
        return int(text) if text else None

    parser.add_argument("--tests", type=number, metavar="N", help="of each fault at most, 6 by default; 0 is all")


def _replay(house: House, args: argparse.Namespace) -> int:
    from carry import replay, replayreport

    found = replay.replay(house, args.upstream, args.first, args.last, args.behaviour, args.tests)
    print(replayreport.text(found))
    for path in replayreport.write(house, found):
        print(f"report   {house.relative(path)}")
    changed = replay.correct(house, found) if args.write else []
    for path in changed:
        print(f"written  {house.relative(path)}")
    return replayreport.exit_code(found, corrected=bool(changed))


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--upstream", default="", metavar="NAME")
    parser.add_argument("--from", dest="first", default="", metavar="VERSION")
    parser.add_argument("--to", dest="last", default="", metavar="VERSION")
    parser.add_argument(
        "--behaviour", default="", metavar="VERSIONS", help="run the proofs on these, by commas, or on `all`"
    )
    parser.add_argument("--write", action="store_true", help="correct Affects: trailers that behaviour contradicts")
    _tests(parser)


def _plan(house: House, args: argparse.Namespace) -> int:
    import json

    from carry import actions, pins, plan

    chosen = pins.all_pins(house, args.upstream or None, args.version or None)
    if args.gitlab:
        print(json.dumps(plan.gitlab(chosen), indent=1))
    elif args.json:
        print(json.dumps(plan.github(chosen)))
    else:
        print("\n".join("  ".join(cell.values()) for cell in plan.cells(chosen)))
    actions.output("cells", json.dumps(plan.github(chosen)))
    actions.output("upstreams", json.dumps(plan.upstreams(chosen)))
    return 0


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _pins(parser)
    parser.add_argument("--json", action="store_true", help="one line, as a matrix of GitHub Actions takes it")
    parser.add_argument("--gitlab", action="store_true", help="a child pipeline of GitLab")


def _test_client(house: House, args: argparse.Namespace) -> int:
    from carry.testing import test_client

    return test_client(house)


def _doctor(house: House, args: argparse.Namespace) -> int:
    from carry.doctor import examine

    checks = examine(house)
    for check in checks:
        print(f"{'ok ' if check.ok else 'BAD'}  {check.name:7} {check.seen}")
    return 0 if all(check.ok for check in checks) else CouldNotRun.exit_code


def _clean(house: House, args: argparse.Namespace) -> int:
    from carry.clean import clean

    for name in clean(house):
        print(f"kept  {name}, the published index; remove it by hand where nobody installs from it any more")
    return 0


COMMANDS: dict[str, Command] = {
    "build-wheels": Command("build patched and pristine wheels of every pin", _build_wheels, _pins, writes=True),
    "apply": Command("lay a pin's work tree, one commit per patch, to edit", _apply, _one_pin, writes=True),
    "refresh": Command("export a pin's work tree to its patch files", _refresh, _one_pin, writes=True),
    "lint": Command("check every series against the rules", _lint, _pins, writes=True),
    "test": Command("lint, test the tool, prove every pin, publish, and install as a user would", _test, _nothing),
    "test-tool": Command("run the tests of the tool itself", _test_tool, _nothing),
    "test-resume": Command("run the regression tests of pins, or of one fault, on both flavours", _prove, _fault),
    "test-client": Command("install from the published index with pip and uv, as a user would", _test_client, _nothing),
    "prove": Command("run the regression tests on both flavours and write dist/proofs/", _prove, _pins),
    "leave-one-out": Command("leave each patch out: its tests must miss it", _leave_one_out, _left_out),
    "matrix": Command("run every way to resume, pairwise, and write dist/matrix/", _matrix, _cells),
    "matrix-full": Command("the same with every combination: hours", _matrix, _cells),
    "matrix-all": Command("the matrix of every pin, both flavours", _matrix_all, _pins),
    "matrix-slice": Command("a fixed slice of the matrix, on every patched wheel: minutes", _matrix_slice, _pins),
    "matrix-diff": Command("compare two files of dist/matrix/ cell by cell", _matrix_diff, _two_files),
    "index": Command("publish proven wheels to dist/simple/", _index, _pins, writes=True),
    "serve": Command("serve dist/simple/ on loopback", _serve, _port),
    "bench": Command("measure what the tool costs, as ratios", _bench, _rounds),
    "bench-load": Command("measure what patched loads cost against pristine ones", _bench_load, _rounds),
    "record": Command("keep this machine's proofs in patches/ and in the README's table", _record, _pins, writes=True),
    "bump": Command("judge every patch of a pin against a release of upstream's", _bump, _bump_arguments),
    "replay": Command("carry the set through upstream's releases, in order", _replay, _replay_arguments),
    "plan": Command("list the cells that CI fans out over, one pin and stack each", _plan, _plan_arguments),
    "doctor": Command("look at what this machine has and lacks", _doctor, _nothing),
    "clean": Command(
        "remove build/ and dist/, but not dist/simple/, unless a work tree holds unexported work",
        _clean,
        _nothing,
        writes=True,
    ),
}


class _Parser(argparse.ArgumentParser):
    """argparse, with a wrong argument as an error like any other: one line, exit 1."""

    def error(self, message: str):
        raise UserError(f"{message}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="carry", description=sys.modules["carry"].__doc__)
    subs = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.arguments(subs.add_parser(name, help=command.help, description=command.help))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every failure is one line on stderr and the exit code of its error."""
    try:
        with _signals():
            return run(parser().parse_args(argv))
    except CarryError as error:
        if str(error):
            say(f"carry: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
            say("carry: interrupted; run the same command again to carry on")
        return 128 + getattr(error, "number", signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        import errno

        code = errno.errorcode.get(error.errno or 0)
        path = error.filename2 or error.filename  # of a copy, the second is the one written
        if code in _NO_RIGHT + _IN_THE_WAY and (shown := _shown(path, ours=code in _IN_THE_WAY)):
            say(f"carry: {shown}: {(error.strerror or '').lower()}; move it away or make it yours, and run again")
            return CouldNotRun.exit_code
        if code in _FULL_DISK:
            where = f" at {path}" if path else ""
            say(f"carry: no space left{where}; free some and run the same command again")
            return CouldNotRun.exit_code
        return _bug(error)
    except Exception as error:
        return _bug(error)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise here, where nobody handles or (as nohup does) ignores them already."""
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(path: object, ours: bool) -> str | None:
    """`path` as a person types it; None where there is none, or (`ours`) where it is not build/ or dist/."""
    if not isinstance(path, (str, Path)):
        return None
    with contextlib.suppress(CarryError):
        house = find_house()
        absolute = Path(path).absolute()
        if not ours or absolute.is_relative_to(house.build) or absolute.is_relative_to(house.dist):
            return house.relative(absolute)
    return None


def run(args: argparse.Namespace) -> int:
    command = COMMANDS[args.command]
    house = find_house()
    if not command.writes:
        return command.run(house, args)
    from carry.clean import sweep

    with locked(house.build, f"carry {args.command}", say):
        sweep(house)
        try:
            return command.run(house, args)
        except KeyboardInterrupt:
            sweep(house)  # what was being made when the signal came, or still had a writer when it was removed
            raise


def _bug(error: Exception) -> int:
    """A failure nobody foresaw: the traceback to a file, one line to the terminal."""
    text = "".join(traceback.format_exception(error))
    line = f"carry: bug in carry: {type(error).__name__}: {' '.join(str(error).split())}"
    try:
        house = find_house()
        log = house.build / "logs" / f"bug-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text, encoding="utf-8")
        say(f"{line}; please report it with {house.relative(log)}")
    except (OSError, CarryError):
        say(f"{line}\n{text}")
    return CarryError.exit_code


if __name__ == "__main__":
    sys.exit(main())
