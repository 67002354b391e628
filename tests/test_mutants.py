import pytest
from mutants import MUTANTS, build, complaints


def test_the_unchanged_package_passes_the_short_suite(tmp_path):
    assert complaints(build(tmp_path, "dsv41_unchanged")) == []


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[m[0] for m in MUTANTS])
def test_mutant_is_rejected(number, tmp_path):
    _, *change = MUTANTS[number]
    assert complaints(build(tmp_path, f"dsv41_mutant_{number}", *change))
