"""Growth of a process: a leak is seen, a warm-up and a restless process are not taken for one."""

import random

from ciuic.lab.soak_meter import EVERY_S, LEAST_LIFE_S, Sample, growth_of, leaks


def life(seconds: float, *, files_per_hour: float = 0.0, memory_per_hour: float = 0.0) -> list[Sample]:
    """A process that takes 60 MB in its first seconds and whose files come and go."""
    chance = random.Random(3)
    found = []
    for number in range(int(seconds / EVERY_S)):
        at_s = 100.0 + number * EVERY_S
        hours = (at_s - 100.0) / 3600
        memory = 120e6 + 60e6 * min(1.0, number / 10) + memory_per_hour * hours + 2e6 * chance.random()
        files = 30 + chance.randrange(6) + files_per_hour * hours
        found.append(Sample(at_s, int(memory), int(files), 12 + chance.randrange(3)))
    return found


def test_a_short_life_says_nothing() -> None:
    assert growth_of("n1", 7, life(LEAST_LIFE_S - 10)) is None
    assert growth_of("n1", 7, []) is None


def test_a_healthy_process_has_no_leak() -> None:
    for seconds in (100.0, 180.0, 7200.0):
        growth = growth_of("n1", 7, life(seconds))
        assert growth is not None
        assert leaks(growth) == []


def test_files_that_are_never_closed_are_a_leak() -> None:
    growth = growth_of("hub", 7, life(3600.0, files_per_hour=60))
    assert growth is not None
    (text,) = leaks(growth)
    assert text.startswith("files of hub (7): 42 -> 82 in ")


def test_memory_that_only_grows_is_a_leak() -> None:
    growth = growth_of("hub", 7, life(3600.0, memory_per_hour=300e6))
    assert growth is not None
    assert [text.split()[0] for text in leaks(growth)] == ["memory_bytes"]
