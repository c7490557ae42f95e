"""Run many cases as one pytest test. Thousands of tests hide failures, and each one has setup cost."""

import contextlib
import functools
import inspect

MAX_TEXT = 200


def check_each(names, cases):
    """Run a test for each case, like `pytest.mark.parametrize`, but as one test.

    All cases run. The error lists every failed case with its traceback and values. Each case has its own `tmp_path`,
    `monkeypatch` changes and captured output; the other fixtures are shared.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = list(cases)
    assert not any(hasattr(case, "marks") for case in cases), "marks of a case need pytest.mark.parametrize"
    cases = [case if len(names) > 1 else (case,) for case in cases]
    assert cases, f"no case of {', '.join(names)}"
    assert all(len(case) == len(names) for case in cases), f"each case has a value of {', '.join(names)}"

    def decorate(test):
        @functools.wraps(test)
        def run_all(**fixtures):
            errors = []
            for number, case in enumerate(cases):
                values = dict(zip(names, case, strict=True))
                try:
                    with fixtures_of_case(number, fixtures) as of_case:
                        test(**of_case, **values)
                except Exception as error:  # noqa: BLE001, raised below with the others
                    error.add_note(f"case {number}: {describe(values)}")
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(cases)} cases failed", errors)

        parameters = inspect.signature(test).parameters
        assert set(names) <= parameters.keys(), f"{test.__name__} does not take {', '.join(names)}"
        run_all.__signature__ = inspect.Signature([p for name, p in parameters.items() if name not in names])
        return run_all

    return decorate


@contextlib.contextmanager
def fixtures_of_case(number, fixtures):
    fixtures = dict(fixtures)
    if "tmp_path" in fixtures:
        fixtures["tmp_path"] = fixtures["tmp_path"] / f"case_{number}"
        fixtures["tmp_path"].mkdir()
    for name in fixtures.keys() & {"capsys", "capfd"}:
        fixtures[name].readouterr()
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    with contextlib.ExitStack() as stack:
        if "monkeypatch" in fixtures:
            fixtures["monkeypatch"] = stack.enter_context(fixtures["monkeypatch"].context())
        yield fixtures


def describe(values):
    texts = (f"{name}={value!r}" for name, value in values.items())
    return ", ".join(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..." for text in texts)
