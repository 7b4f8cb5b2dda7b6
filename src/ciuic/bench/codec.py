"""The codecs beside copying the same memory: torch's copy_ of the same fp32 vector, one thread, in the same rounds.

Each operation runs right after one copy; a ratio is the median over the rounds of (time of the copy / time of the
operation), in processor time of the thread, so 1 is as fast as copying. "compress" is with error feedback:
x = e - minus_d, payload, e_next = x - decoded. torch's top-k and the operations of DeepSpeed's 1-bit optimizers run
on a part of the same vector in fewer rounds, because they are slow.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ciuic.bench import Table
from ciuic.bench.codec_others import DeepSpeedOneBit, torch_top_k_global, torch_top_k_of_blocks
from ciuic.bench.codec_picture import draw
from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape, NumpyVectors
from ciuic.codec.native import LEVELS, choose_kernel
from ciuic.errors import UsageError

ROW = 4096
FALLBACK = "fallback"
TARGETS = {
    "onebit_compress_over_memcpy": 0.9,
    "onebit_compress_over_memcpy_portable": 0.5,
    "onebit_compress_over_memcpy_fallback": 0.2,
    "onebit_decode_over_memcpy": 1.2,
    "int8_compress_over_memcpy": 0.6,
    "int4_compress_over_memcpy": 0.6,
    "topk_compress_over_torch_topk": 4.0,
}
"""What the numbers must reach; the first one on a processor with AVX-512."""
BITS = {"none": 32.0, "bf16": 16.0, "int8": 8 + 1 / 16, "int4": 4 + 1 / 16, "2-bit": 2 + 1 / 16, "1-bit": 1 + 1 / 256}
BITS["topk"] = (64 * 14 + 32) / 4096
"""Bits per parameter by the formulas of docs/reference/codecs.md, for whole blocks."""


@dataclass(kw_only=True)
class Timing:
    """Processor seconds of one operation and of the copies right before it."""

    bytes_in: int
    seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    @property
    def over_memcpy(self) -> float:
        """1: as fast as copying."""
        return statistics.median(c / s for c, s in zip(self.copy_seconds, self.seconds, strict=True))

    @property
    def bytes_per_s(self) -> float:
        """fp32 bytes per second in the best round."""
        return self.bytes_in / min(self.seconds)


@dataclass(kw_only=True)
class Bench:
    """Vectors that every operation shares."""

    minus_d: np.ndarray
    e: np.ndarray
    e_next: np.ndarray
    copy_from: Tensor
    copy_to: Tensor

    @classmethod
    def of(cls, elements: int) -> "Bench":
        vectors, random = NumpyVectors(), np.random.default_rng(0)
        minus_d, e = (vectors.from_host(random.standard_normal(elements, dtype=np.float32)) for _ in range(2))
        e_next, source = vectors.zeros(elements), torch.from_numpy(minus_d)
        e_next[:] = 1  # so that its pages exist
        return cls(minus_d=minus_d, e=e, e_next=e_next, copy_from=source, copy_to=torch.ones_like(source))

    def run(self, operations: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, Timing]:
        """Every operation once per round, a copy before each; one round before the clock starts."""
        timings = {name: Timing(bytes_in=self.minus_d.nbytes) for name in operations}
        for number in range(rounds + 1):
            for name, operation in operations.items():
                copied = _seconds(lambda: self.copy_to.copy_(self.copy_from))
                spent = _seconds(operation)
                if number:
                    timings[name].copy_seconds.append(copied)
                    timings[name].seconds.append(spent)
        return timings


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument("--elements", type=int, default=1 << 25, help="elements of the vector (default: 33554432)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each operation (default: 9)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ratios of all codecs and back ends; the numbers of TARGETS at the top level."""
    if options.elements < 8 * ROW or options.rounds < 1:
        raise UsageError(f"at least {8 * ROW} elements and 1 round are needed", next="use larger numbers")
    torch.set_num_threads(1)
    elements = options.elements // (8 * ROW) * (8 * ROW)
    best = back_ends()[0]
    bench = Bench.of(elements)
    timings = bench.run(_operations(bench, best), options.rounds)
    one_bit = bench.run(_one_bit_operations(bench), options.rounds)
    part = Bench.of(elements // 8)
    others = part.run(_slow_operations(part, best), max(1, options.rounds // 3))
    result: dict[str, Any] = {"elements": elements, "back_end": best, "back_ends": list(one_bit)}
    result.update(_top_level(timings, one_bit, others))
    result["targets"] = {
        name: {"target": target, "met": result[name] >= target} for name, target in TARGETS.items() if name in result
    }
    result["memcpy_bytes_per_s"] = round(max(4 * elements / min(t.copy_seconds) for t in timings.values()))
    result["bits_per_parameter"] = _bits(elements)
    result["codecs"] = [_row(name, timings) for name in CODEC_NAMES]
    result["one_bit"] = {name: _numbers(timing) for name, timing in one_bit.items()}
    result["others"] = {name: _numbers(timing) for name, timing in others.items()}
    return result


def back_ends() -> list[str]:
    """Those that run here, the best first."""
    kernel = choose_kernel("")
    return [*reversed(LEVELS[: kernel.level + 1]), FALLBACK] if kernel else [FALLBACK]


def tables(result: dict[str, Any]) -> list[Table]:
    """The same for a terminal."""
    columns = ("codec", "bits/parameter", "compress", "decode", "accumulate", "compress GB/s", "decode GB/s")
    rows: list[tuple[str, ...]] = [
        (
            row["name"],
            f"{result['bits_per_parameter'][row['name']]['measured']:.3f}",
            *(f"{row[what]['over_memcpy']:.2f}" for what in ("compress", "decode", "accumulate")),
            *(f"{row[what]['bytes_per_s'] / 1e9:.2f}" for what in ("compress", "decode")),
        )
        for row in result["codecs"]
    ]
    memcpy = f"memcpy = torch copy_, {result['memcpy_bytes_per_s'] / 1e9:.2f} GB/s; 1 is as fast as copying"
    others: list[tuple[str, ...]] = [
        (name, f"{numbers['over_memcpy']:.3f}", f"{numbers['bytes_per_s'] / 1e9:.2f}")
        for name, numbers in [
            *(("1-bit compress, " + n, v) for n, v in result["one_bit"].items()),
            *result["others"].items(),
        ]
    ]
    goals: list[tuple[str, ...]] = [
        (name, f"{result[name]:.2f}", f"{goal['target']:.1f}", "yes" if goal["met"] else "NO")
        for name, goal in result["targets"].items()
    ]
    return [
        Table(title=f"codecs over memcpy ({result['back_end']})", columns=columns, rows=rows, note=memcpy),
        Table(title="back ends and others", columns=("operation", "over memcpy", "GB/s"), rows=others),
        Table(title="targets", columns=("number", "measured", "target", "met"), rows=goals),
    ]


def picture(result: dict[str, Any], folder: Path) -> Path:
    """codec.png: every codec over memcpy, and 1-bit on every back end beside DeepSpeed's operations."""
    return draw(result, folder / "codec.png")


def _operations(bench: Bench, back_end: str) -> dict[Any, Callable[[], object]]:
    operations: dict[Any, Callable[[], object]] = {}
    for name in CODEC_NAMES:
        codec = _codec(name, len(bench.e), back_end)
        payload = codec.encode(bench.e)
        operations[name, "compress"] = lambda c=codec: c.compress(bench.minus_d, bench.e, bench.e_next)
        operations[name, "decode"] = lambda c=codec, p=payload: c.decode(p, bench.e_next)
        operations[name, "accumulate"] = lambda c=codec, p=payload: c.accumulate(p, np.float32(0.3), bench.e_next)
    return operations


def _one_bit_operations(bench: Bench) -> dict[Any, Callable[[], object]]:
    codecs = {name: _codec("1-bit", len(bench.e), name) for name in back_ends()}
    return {name: lambda c=c: c.compress(bench.minus_d, bench.e, bench.e_next) for name, c in codecs.items()}


def _slow_operations(part: Bench, back_end: str) -> dict[Any, Callable[[], object]]:
    codec, values = _codec("topk", len(part.e), back_end), torch.from_numpy(part.e)
    deepspeed = DeepSpeedOneBit(len(part.e))
    return {
        "topk compress (ours)": lambda: codec.compress(part.minus_d, part.e, part.e_next),
        "torch.topk of each block": lambda: torch_top_k_of_blocks(values, ROW, 64),
        "torch.topk of the whole": lambda: torch_top_k_global(values, len(part.e) // 64),
        "DeepSpeed's 1-bit compress": lambda: deepspeed.compress(part.copy_from),
        "DeepSpeed's 1-bit decode": deepspeed.decode,
    }


def _top_level(timings: dict[Any, Timing], one_bit: dict[str, Timing], others: dict[str, Timing]) -> dict[str, float]:
    first = next(iter(one_bit))
    found = {"onebit_compress_over_memcpy": one_bit[first].over_memcpy}
    found.update({f"onebit_compress_over_memcpy_{name}": timing.over_memcpy for name, timing in one_bit.items()})
    for name in CODEC_NAMES:
        word = {"1-bit": "onebit", "2-bit": "twobit"}.get(name, name)
        for what in ("compress", "decode", "accumulate"):
            found.setdefault(f"{word}_{what}_over_memcpy", timings[name, what].over_memcpy)
    ours = statistics.median(others["topk compress (ours)"].seconds)
    for name, key in (("of each block", ""), ("of the whole", "_global")):
        theirs = statistics.median(others[f"torch.topk {name}"].seconds)
        found[f"topk_compress_over_torch_topk{key}"] = theirs / ours
    deepspeed = statistics.median(others["DeepSpeed's 1-bit compress"].seconds)
    found["onebit_compress_over_deepspeed"] = (
        one_bit[first].bytes_per_s * deepspeed / others["DeepSpeed's 1-bit compress"].bytes_in
    )
    return {name: round(value, 3) for name, value in found.items()}


def _bits(elements: int) -> dict[str, dict[str, float]]:
    found = {}
    for name in CODEC_NAMES:
        measured = 8 * len(_codec(name, elements, FALLBACK).encode(np.zeros(elements, np.float32))) / elements
        found[name] = {"measured": round(measured, 5), "formula": round(BITS[name], 5)}
    return found


def _codec(name: str, elements: int, back_end: str) -> FragmentCodec:
    shape = FragmentShape(rows=((elements // ROW, ROW),), small_count=0, buffer_count=0)
    return FragmentCodec(name, shape, back_end=back_end, threads=1)


def _row(name: str, timings: dict[Any, Timing]) -> dict[str, Any]:
    return {"name": name, **{w: _numbers(timings[name, w]) for w in ("compress", "decode", "accumulate")}}


def _numbers(timing: Timing) -> dict[str, float]:
    return {"over_memcpy": round(timing.over_memcpy, 4), "bytes_per_s": round(timing.bytes_per_s)}


def _seconds(operation: Callable[[], object]) -> float:
    began = time.thread_time()
    operation()
    return time.thread_time() - began
