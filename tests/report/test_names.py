"""What a reader calls the laws of scaling."""

import pytest

from farspan.evaluation import laws
from farspan.report.names import LAWS, scaling_name


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("none+log", "no scaling, log length"),
        ("ntk-4", "dynamic NTK 4"),
        ("ntk-2.5/per_request+log", "dynamic NTK 2.5 per request, log length"),
        ("static-ntk-4", "static NTK 4"),
        ("pi-4", "PI 4"),
        ("yarn-8", "YaRN 8"),
        ("llama3-8", "Llama 3's law 8"),
        ("mine", "mine"),
    ],
)
def test_a_law_is_said_in_words(scaling: str, words: str) -> None:
    assert scaling_name(scaling) == words


def test_every_law_that_results_can_name_has_words() -> None:
    assert set(LAWS) == set(laws.NAMES.values())
