import pytest
from mutants import MODEL_CHECKS, MUTANTS, SERVING, SERVING_CHECKS, build, complaints

ALL = [(m, (*MODEL_CHECKS, *SERVING_CHECKS)) for m in MUTANTS]
ALL += [(m, (*SERVING_CHECKS, *MODEL_CHECKS)) for m in SERVING]


def test_the_unchanged_package_passes_the_short_suite(tmp_path):
    assert list(complaints(build(tmp_path, "dsv41_unchanged"))) == []


@pytest.mark.parametrize("number", range(len(ALL)), ids=[m[0] for m, _ in ALL])
def test_mutant_is_rejected(number, tmp_path):
    """The first complaint is enough; the checks that are about the changed part come first."""
    (_, *change), checks = ALL[number]
    package = build(tmp_path, f"dsv41_mutant_{number}", *change)
    assert next(complaints(package, checks), None) is not None
