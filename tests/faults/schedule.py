"""The order of faults: mixed, then one after another, round after round."""

import random
from collections.abc import Iterator, Sequence

from tests.faults.catalogue.fault import Fault

_AT_ONCE = 3


def rounds(faults: Sequence[Fault], chance: random.Random) -> Iterator[list[Fault]]:
    """Yield groups without end. Each round has every fault once: first mixed, then alone, and so on."""
    while True:
        yield from mixed(faults, chance)
        yield from ([fault] for fault in chance.sample(faults, k=len(faults)))


def mixed(faults: Sequence[Fault], chance: random.Random) -> list[list[Fault]]:
    """Return groups of faults to inject together, none of which touch the same thing."""
    groups: list[list[Fault]] = []
    for fault in chance.sample(faults, k=len(faults)):
        for group in groups:
            if len(group) < _AT_ONCE and all(fault.touches.isdisjoint(other.touches) for other in group):
                group.append(fault)
                break
        else:
            groups.append([fault])
    return groups
