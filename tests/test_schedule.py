"""Schedules print, parse, and give one letter per epoch; a wrong one is answered with the nearest right form."""

import pytest

from parlay.errors import InputError
from parlay.schedule import Schedule

# epochs:  1   2    3     4      5       6        7         8          9           10           11            12
TABLE = {
    "parallel": "S SP SPP SPPP SPPPP SPPPPP SPPPPPP SPPPPPPP SPPPPPPPP SPPPPPPPPP SPPPPPPPPPP SPPPPPPPPPPP",
    "serial": "S SS SSS SSSS SSSSS SSSSSS SSSSSSS SSSSSSSS SSSSSSSSS SSSSSSSSSS SSSSSSSSSSS SSSSSSSSSSSS",
    "alternate:4:1": "S SP SPP SPPP SPPPS SPPPSP SPPPSPP SPPPSPPP SPPPSPPPP SPPPSPPPPS SPPPSPPPPSP SPPPSPPPPSPP",
    "alternate:2:3": "S SP SPS SPSS SPSSS SPSSSP SPSSSPP SPSSSPPS SPSSSPPSS SPSSSPPSSS SPSSSPPSSSP SPSSSPPSSSPP",
    "alternate:1:1": "S SS SSP SSPS SSPSP SSPSPS SSPSPSP SSPSPSPS SSPSPSPSP SSPSPSPSPS SSPSPSPSPSP SSPSPSPSPSPS",
    "tail:4:1": "S SP SPS SPPS SPPPS SPPPPS SPPPPPS SPPPPPSS SPPPPPPSS SPPPPPPPSS SPPPPPPPPSS SPPPPPPPPPSS",
    "tail:2:3": "S SS SSS SPSS SPSSS SPSSSS SPPSSSS SPPSSSSS SPPPSSSSS SPPPSSSSSS SPPPSSSSSSS SPPPPSSSSSSS",
}


@pytest.mark.parametrize("epochs", range(1, 13))
@pytest.mark.parametrize("text", TABLE)
def test_a_schedule_gives_these_phases(text: str, epochs: int) -> None:
    assert Schedule.parse(text).phases(epochs) == TABLE[text].split()[epochs - 1]


@pytest.mark.parametrize("text", [*TABLE, "alternate:10:25"])
def test_a_schedule_prints_as_it_was_written(text: str) -> None:
    assert str(Schedule.parse(text)) == text
    assert Schedule.parse(str(Schedule.parse(text))) == Schedule.parse(text)


def test_a_schedule_is_its_kind_and_its_numbers() -> None:
    assert Schedule.parse("alternate:4:1") == Schedule("alternate", 4, 1)
    assert Schedule.parse("serial") == Schedule("serial")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("paralell", "parallel"),
        ("Serial", "serial"),
        ("alternating:4:1", "alternate:4:1"),
        ("tails:3:1", "tail:4:1"),
        ("alternate", "alternate:4:1"),
        ("alternate:4", "alternate:4:1"),
        ("tail:4:1:2", "tail:4:1"),
        ("serial:1", "serial"),
        ("parallel:4:1", "parallel"),
        ("alternate:0:1", "alternate:4:1"),
        ("alternate:4:-1", "alternate:4:1"),
        ("tail:4:0.5", "tail:4:1"),
        ("tail:4:", "tail:4:1"),
    ],
)
def test_a_wrong_schedule_is_answered_with_the_nearest_form(text: str, right: str) -> None:
    with pytest.raises(InputError, match=f": write {right}$") as error:
        Schedule.parse(text)
    assert f"'{text}'" in str(error.value)


@pytest.mark.parametrize("text", ["", ":", "xyz", "4:1"])
def test_nonsense_is_an_input_error_too(text: str) -> None:
    with pytest.raises(InputError, match="unknown schedule"):
        Schedule.parse(text)
