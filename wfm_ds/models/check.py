"""`python -m wfm_ds.models.check PACKAGE:Class --tiny FOLDER`: hold a family of yours to the stock pipeline.

The checks are those of our own families (wfm_ds/contract/). Exit codes: 0 all kept, 1 one is not, 2 a user's mistake.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wfm_ds.errors import ModelError
from wfm_ds.program import Parser, program
from wfm_ds.user_class import import_object

if TYPE_CHECKING:
    from wfm_ds.contract.case import Case

NOT_KEPT = 1


def parser() -> Parser:
    p = Parser(
        prog="wfm_ds.models.check",
        description="Check a model family of yours against the stock diffusers pipeline, on a tiny one.",
        epilog="Example: %(prog)s my_lumina:Lumina2 --tiny outputs/tiny_lumina",
    )
    p.add_argument("family", metavar="PACKAGE:Class", help="the class, as in model.family")
    p.add_argument("--tiny", required=True, metavar="FOLDER", help="a small random pipeline of the real classes")
    p.add_argument(
        "--case", metavar="PACKAGE:CASE", help="a wfm_ds.contract.case.Case: what the checks must know besides"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> int:
    """Print a line for each check, with a dash for one that does not apply. Raises ModelError where the family cannot
    be loaded."""
    from wfm_ds.contract.case import Case
    from wfm_ds.contract.checks import examine
    from wfm_ds.contract.subject import Subject
    from wfm_ds.distributed.logs import quieten_libraries
    from wfm_ds.models import registry

    quieten_libraries()
    case = Case() if args.case is None else named_case(args.case)
    subject = Subject(registry.resolve(args.tiny, args.family), case, args.family)
    _ = subject.model  # what cannot be loaded is one sentence, not twenty
    findings = []
    for finding in examine(subject):
        findings.append(finding)
        verdict = "-" if not finding.applies else "kept" if finding.sentence is None else "BROKEN"
        why = "" if finding.sentence is None else f": {finding.sentence}"
        sys.stdout.write(f"{verdict:8}{finding.check}{why}\n")
        sys.stdout.flush()  # each takes a second
    applied = [finding for finding in findings if finding.applies]
    broken = sum(finding.sentence is not None for finding in applied)
    others = f", {idle} do not apply" if (idle := len(findings) - len(applied)) else ""
    sys.stdout.write(f"{subject.model.family}: {len(applied) - broken} of {len(applied)} checks kept{others}\n")
    return NOT_KEPT if broken else 0


def named_case(path: str) -> Case:
    """The Case at `package.module:NAME`. Raises ModelError if there is none."""
    from wfm_ds.contract.case import Case

    module_name, _, name = path.partition(":")
    found = import_object(path, key="--case", error=ModelError, form="package.module:CASE")
    if not isinstance(found, Case):
        raise ModelError(f"--case {path}: {module_name} has no {name!r} that is a wfm_ds.contract.case.Case")
    return found


if __name__ == "__main__":
    sys.exit(main())
