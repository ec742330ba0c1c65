"""``python -m fuzz``: run cases for some time, or one case again; see ``make fuzz``."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from fuzz.outcome import Outcome, escaped
from fuzz.server import LIMIT, Server


def main() -> int:
    """Run the cases that the command line asks for; the exit code is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time for generated cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="", metavar="KIND:INDEX", help="run one case and keep its files")
    parser.add_argument("--kind", default="", help="comma-separated kinds (default: all)")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="most cases of each kind")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a case may take")
    given = parser.parse_args()
    with Server() as server:
        if given.case:
            kind, _, index = given.case.partition(":")
            outcome = server.run(kind, int(index), given.seed, limit=given.limit, keep=True)
            _say(outcome)
            return int(bool(outcome.problems))
        kinds = [kind for kind in given.kind.split(",") if kind]
        return int(_run(server, kinds, given))


def _run(server: Server, kinds: list[str], given: argparse.Namespace) -> bool:
    """Run known cases, then generated ones of all kinds in turn; return whether a promise was broken."""
    until = time.monotonic() + given.seconds
    counts: Counter[str] = Counter()
    broken: defaultdict[str, list[Outcome]] = defaultdict(list)
    for kind, index in _cases(kinds, given.cases):
        if kind != "known" and time.monotonic() > until:
            break
        outcome = server.run(kind, index, given.seed, limit=given.limit)
        counts[kind] += 1
        for what, _ in outcome.problems:
            if not broken[what]:
                _say(f"{outcome}\n")
            broken[what].append(outcome)
    _say("cases: " + ", ".join(f"{kind} {count}" for kind, count in counts.items()))
    failed = len({outcome.name for found in broken.values() for outcome in found})
    _say(f"failed: {failed} of {counts.total()}, in {len(broken)} classes")
    for what, found in sorted(broken.items(), key=lambda item: -len(item[1])):
        _say(f"  {len(found):4}  {escaped(what)}: {found[0].repeat}")
    return bool(broken)


def _cases(kinds: Iterable[str], most: int) -> Iterator[tuple[str, int]]:
    """Yield all known cases, then generated ones of each kind in turn."""
    from fuzz.cases import GENERATED
    from fuzz.known import KNOWN

    if not kinds or "known" in kinds:
        yield from (("known", index) for index in range(len(KNOWN)))
    generated = [kind for kind in GENERATED if not kinds or kind in kinds]
    if generated:
        yield from ((kind, index) for index in itertools.islice(itertools.count(), most) for kind in generated)


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
