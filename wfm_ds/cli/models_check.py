"""`wfm models check PACKAGE:Class --tiny FOLDER`: compare your model family with the diffusers pipeline.

Exit codes: 0 all checks passed, 1 a check failed, 2 user error.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from wfm_ds.errors import ModelError
from wfm_ds.program import CommandParser
from wfm_ds.user_class import import_object

if TYPE_CHECKING:
    from wfm_ds.contract.case import Case


def parser() -> CommandParser:
    p = CommandParser(
        description="Compare your model family with the diffusers pipeline, on a tiny random model.",
        epilog="Example: %(prog)s my_lumina:Lumina2 --tiny outputs/tiny_lumina",
    )
    p.add_argument("family", metavar="PACKAGE:Class", help="your class, as in model.family")
    p.add_argument("--tiny", required=True, metavar="FOLDER", help="small random pipeline with the real classes")
    p.add_argument(
        "--case", metavar="PACKAGE:CASE", help="a wfm_ds.contract.case.Case with further settings of the checks"
    )
    return p


def run(args: argparse.Namespace) -> int:
    from wfm_ds.contract.case import Case
    from wfm_ds.contract.checks import run_checks
    from wfm_ds.contract.family_under_test import FamilyUnderTest
    from wfm_ds.models import registry

    case = Case() if args.case is None else import_case(args.case)
    subject = FamilyUnderTest(registry.resolve_pipeline(args.tiny, args.family), case, args.family)
    _ = subject.model  # report a loading error once, not in every check
    findings = []
    for finding in run_checks(subject):
        findings.append(finding)
        verdict = "-" if not finding.applies else "passed" if finding.message is None else "FAILED"
        why = "" if finding.message is None else f": {finding.message}"
        sys.stdout.write(f"{verdict:8}{finding.name}{why}\n")
        sys.stdout.flush()  # show each result at once: a check takes about a second
    applied = [finding for finding in findings if finding.applies]
    failed = sum(finding.message is not None for finding in applied)
    others = f", {skipped} do not apply" if (skipped := len(findings) - len(applied)) else ""
    sys.stdout.write(f"{subject.model.family}: {len(applied) - failed} of {len(applied)} checks passed{others}\n")
    return 1 if failed else 0


def import_case(path: str) -> Case:
    from wfm_ds.contract.case import Case

    module_name, _, name = path.partition(":")
    case = import_object(path, key="--case", error=ModelError, form="package.module:CASE")
    if not isinstance(case, Case):
        raise ModelError(f"--case {path}: {module_name} has no {name!r} that is a wfm_ds.contract.case.Case")
    return case
