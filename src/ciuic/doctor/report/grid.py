"""The numbers of the heat map: how each module moved at each sampled step, on each rank that told."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ciuic.doctor.facts import MOVED_FLAGS
from ciuic.doctor.report.history import History, Moment

COLUMNS_MAX = 120
"""More sampled steps share columns; the newest of a column is shown, flags of all of them count."""
APART = 1
"""Bytes of `moved` further apart than this are told as a difference between ranks."""
REPLICATED = frozenset({"ddp", "plain"})
"""Modes in which ranks must move alike; shards, local steps and nodes of a ledger need not."""
MOVED_BYTE, GRAD_BYTE = (200, 16), (128, 12)
"""A byte b of a movement stands for log10 = (b - first) / second, one of a gradient likewise."""
NO_OPTIMIZER = next(bit for bit, text in MOVED_FLAGS.items() if text == "no optimizer")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One module at one column on one rank; bytes as in `facts.MOVEMENT`."""

    moved: int
    grad: int
    flags: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Of one optimizer."""

    optimizer: int
    modules: tuple[str, ...]
    steps: tuple[int, ...]
    """The newest step of each column."""
    cells: Mapping[int, Mapping[tuple[int, int], Cell]]
    """By rank and (row, column)."""
    apart: frozenset[tuple[int, int]]
    """Places where ranks differ that should not."""

    def at(self, row: int, column: int) -> Cell | None:
        """Of the lowest rank that has it; flags of all ranks."""
        found = [cells[row, column] for _, cells in sorted(self.cells.items()) if (row, column) in cells]
        if not found:
            return None
        flags = 0
        for cell in found:
            flags |= cell.flags
        return Cell(moved=found[0].moved, grad=found[0].grad, flags=flags)


def make_grids(history: History) -> list[Grid]:
    """One for each optimizer that told, in order; parameters without an optimizer are in the first."""
    grids = []
    for optimizer, ranks in sorted(history.moments.items()):
        unowned = _modules_without_optimizer(history.unowned) if not grids else {}
        grids.append(_grid(optimizer, ranks, unowned, compared=history.modes <= REPLICATED))
    return grids


def moved_log10(byte: int) -> float | None:
    """log10 of movement by length of the parameters; None: did not move."""
    middle, steps = MOVED_BYTE
    return (byte - middle) / steps if byte else None


def _modules_without_optimizer(unowned: Mapping[str, int]) -> dict[str, int]:
    since: dict[str, int] = {}
    for name, step in unowned.items():
        module = name.rpartition(".")[0]
        since[module] = min(step, since.get(module, step))
    return since


def _grid(optimizer: int, ranks: Mapping[int, list[Moment]], unowned: Mapping[str, int], *, compared: bool) -> Grid:
    moments = [moment for those in ranks.values() for moment in those]
    modules = list(dict.fromkeys(module for moment in moments for module in moment.modules))
    modules += [module for module in unowned if module not in modules]
    rows = {module: row for row, module in enumerate(modules)}
    all_steps = sorted({moment.step for moment in moments})
    columns = _columns(all_steps)
    steps = [max(step for step in all_steps if columns[step] == column) for column in range(max(columns.values()) + 1)]
    cells = {rank: _cells(those, rows, columns) for rank, those in ranks.items()}
    first = cells[min(cells)]
    for module, since in unowned.items():
        for column, step in enumerate(steps):
            if step >= since:
                old = first.get((rows[module], column), Cell(moved=0, grad=0, flags=0))
                first[rows[module], column] = Cell(moved=old.moved, grad=old.grad, flags=old.flags | NO_OPTIMIZER)
    apart = _apart(ranks.values(), rows, columns) if compared else frozenset()
    return Grid(optimizer=optimizer, modules=tuple(modules), steps=tuple(steps), cells=cells, apart=apart)


def _columns(steps: list[int]) -> dict[int, int]:
    count = min(COLUMNS_MAX, len(steps))
    return {step: at * count // len(steps) for at, step in enumerate(steps)}


def _cells(
    moments: Iterable[Moment], rows: Mapping[str, int], columns: Mapping[int, int]
) -> dict[tuple[int, int], Cell]:
    found: dict[tuple[int, int], Cell] = {}
    for moment in sorted(moments, key=lambda moment: moment.step):
        for module, moved, grad, flags in zip(moment.modules, moment.moved, moment.grads, moment.flags, strict=True):
            place = rows[module], columns[moment.step]
            before = found[place].flags if place in found else 0
            found[place] = Cell(moved=moved, grad=grad, flags=flags | before)
    return found


def _apart(
    ranks: Iterable[list[Moment]], rows: Mapping[str, int], columns: Mapping[int, int]
) -> frozenset[tuple[int, int]]:
    """Compared at equal steps."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for moment in (moment for moments in ranks for moment in moments):
        for module, moved in zip(moment.modules, moment.moved, strict=True):
            low, high = spans.get((module, moment.step), (moved, moved))
            spans[module, moment.step] = min(low, moved), max(high, moved)
    return frozenset(
        (rows[module], columns[step]) for (module, step), (low, high) in spans.items() if high - low > APART
    )
