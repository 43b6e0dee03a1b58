"""Which faults come when: one after another, then mixed, round after round."""

import random
from collections.abc import Iterator, Sequence

from tests.faults.faults import Fault

_AT_ONCE = 3


def rounds(faults: Sequence[Fault], chance: random.Random) -> Iterator[list[list[Fault]]]:
    """Give rounds without end. In each every fault comes once: mixed in the odd ones, else by itself."""
    while True:
        yield mixed(faults, chance)
        yield [[fault] for fault in chance.sample(faults, k=len(faults))]


def mixed(faults: Sequence[Fault], chance: random.Random) -> list[list[Fault]]:
    """Return groups of faults that come together; those that touch the same thing do not."""
    groups: list[list[Fault]] = []
    for fault in chance.sample(faults, k=len(faults)):
        for group in groups:
            if len(group) < _AT_ONCE and all(fault.touches.isdisjoint(other.touches) for other in group):
                group.append(fault)
                break
        else:
            groups.append([fault])
    return groups
