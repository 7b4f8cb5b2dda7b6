"""What the learning benchmark compares, and what an earlier study found (loss at the end, for the order only).

Names are short and stable: results, options and pages use them. A mixture of experts has the suffix `-moe`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from ciuic.bench.learning_trial import Setting

FIXED_LR, FIXED_WARMUP = 2e-3, 40
"""The untuned group: one rate and one short warm-up for all, as the earlier study's first table had."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One setting and where its learning rate comes from."""

    setting: Setting
    rate: str | float = "search"
    """`search`: on the grid, with seed 0; another item's name: its best; a number: itself."""
    seeds: int = 3
    """At most so many of the seeds that are asked for."""
    earlier: float | None = None
    """Loss the earlier study found; another text and another initialisation, so only the order compares."""
    group: str = "tuned"


def _rounds(name: str, codec: str, interval: int, earlier: float | None = None) -> Item:
    return Item(setting=Setting(name=name, mode="pseudo_gradient", codec=codec, interval=interval), earlier=earlier)


def _muon(item: Item, earlier: float | None) -> Item:
    setting = replace(item.setting, name=f"muon-{item.setting.name}", optimizer="muon")
    return replace(item, setting=setting, earlier=earlier)


DDP = Item(setting=Setting(name="ddp", mode="ddp"), earlier=2.143)
CORE: tuple[Item, ...] = (
    DDP,
    _rounds("none-h5", "none", 5, 2.221),
    _rounds("onebit-h5", "1-bit", 5, 2.237),
    _rounds("int4-h5", "int4", 5),
    _muon(DDP, 1.796),
    _muon(_rounds("onebit-h5", "1-bit", 5), 1.955),
    _rounds("twobit-h4", "2-bit", 4, 2.201),
    Item(setting=Setting(name="gradient-int4", mode="gradient", codec="int4"), earlier=2.101),
    # the earlier study froze at 20 % of the run, here it is when the warm-up is over: not the same setting
    Item(setting=Setting(name="onebit-adam", mode="onebit_adam", codec="int4")),
)
"""Tuned, on a dense model and on a mixture of experts; the first names are measured first."""

DENSE_ONLY: tuple[Item, ...] = (
    _rounds("int4-h2", "int4", 2, 2.174),
    _rounds("twobit-h2", "2-bit", 2, 2.182),
    _muon(_rounds("none-h5", "none", 5), 1.959),
    Item(setting=Setting(name="gradient-none", mode="gradient", codec="none"), earlier=2.123),
)

_BORROWED = "onebit-h5"


def _borrowed(name: str, codec: str, interval: int, earlier: float) -> Item:
    return replace(_rounds(name, codec, interval, earlier), rate=_BORROWED, seeds=1)


SCREENED: tuple[Item, ...] = (
    _borrowed("onebit-h1", "1-bit", 1, 2.277),
    _borrowed("onebit-h2", "1-bit", 2, 2.234),
    _borrowed("onebit-h4", "1-bit", 4, 2.217),
    _borrowed("int4-h1", "int4", 1, 2.163),
    _borrowed("int4-h4", "int4", 4, 2.200),
    _borrowed("twobit-h10", "2-bit", 10, 2.269),
    Item(setting=Setting(name="gradient-twobit", mode="gradient", codec="2-bit"), rate="ddp", seeds=1, earlier=2.259),
    Item(setting=Setting(name="gradient-onebit", mode="gradient", codec="1-bit"), rate="ddp", seeds=1, earlier=2.877),
)
"""One seed, at the rate that the named neighbour found best."""


def _fixed(item: Item, earlier: float, outer_momentum: float = 0.0, seeds: int = 1) -> Item:
    name = f"fixed-{item.setting.name}" + (f"-momentum{outer_momentum}" if outer_momentum else "")
    setting = replace(item.setting, name=name, warmup=FIXED_WARMUP, outer_momentum=outer_momentum)
    return Item(setting=setting, rate=FIXED_LR, seeds=seeds, earlier=earlier, group="fixed")


FIXED: tuple[Item, ...] = (
    _fixed(DDP, 2.243),
    _fixed(_rounds("none-h5", "none", 5), 2.337),
    _fixed(_rounds("none-h20", "none", 20), 2.377),
    _fixed(_rounds("int4-h5", "int4", 5), 2.336),
    _fixed(_rounds("int4-h20", "int4", 20), 2.384),
    _fixed(_rounds("onebit-h1", "1-bit", 1), 2.376),
    _fixed(_rounds("onebit-h2", "1-bit", 2), 2.347),
    _fixed(_rounds("onebit-h5", "1-bit", 5), 2.354),
    _fixed(_rounds("onebit-h20", "1-bit", 20), 2.422, seeds=3),
    _fixed(_rounds("onebit-h5", "1-bit", 5), 2.463, outer_momentum=0.5, seeds=3),
)


def _moe(item: Item) -> Item:
    return replace(item, setting=replace(item.setting, name=f"{item.setting.name}-moe", model="moe"), earlier=None)


ALL: tuple[Item, ...] = (*CORE, *(_moe(item) for item in CORE), *DENSE_ONLY, *FIXED, *SCREENED)
QUICK = ("ddp", "none-h5", "onebit-h5", "gradient-int4", "onebit-h5-moe")


def choose(patterns: Sequence[str]) -> list[Item]:
    """The items whose names match one of the patterns; all when there is none."""
    return [item for item in ALL if not patterns or any(fnmatch(item.setting.name, p) for p in patterns)]


def quick_items() -> list[Item]:
    """A few settings, few steps, one seed, one rate: shows that all works, no result."""
    chosen = [item for item in ALL if item.setting.name in QUICK]
    short = [replace(item.setting, steps=20, warmup=8) for item in chosen]
    return [replace(item, setting=s, rate=4e-3, seeds=1, earlier=None) for item, s in zip(chosen, short, strict=True)]
