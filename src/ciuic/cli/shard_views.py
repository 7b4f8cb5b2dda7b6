"""What `ciuic hub shards` prints."""

from ciuic.net.shard_messages import FragmentLoad, ShardLoad, ShardsInfo
from ciuic.units import format_bytes


def shard_lines(info: ShardsInfo, *, started: bool) -> list[str]:
    """Load per place, before and (when something should move) after; experts by fragment; then the moves."""
    lines = [_line(place) for place in info.places]
    if info.moves or info.planned != info.places:
        lines += ["", "after the moves:", *(_line(place) for place in info.planned)]
    if any(f.experts for f in info.fragments):
        lines += ["", *(_fragment_line(f) for f in info.fragments)]
    lines += [f"fragment {f.fragment} is on its way to {f.moving_to}" for f in info.fragments if f.moving_to]
    if info.moves and not started:
        moves = ", ".join(f"{fragment} to {to}" for fragment, to in info.moves)
        lines += ["", f"better: fragment {moves} (ciuic hub shards {info.run_id} --rebalance)"]
    return lines


def _fragment_line(fragment: FragmentLoad) -> str:
    before, after = fragment.shard or "the hub", fragment.planned_shard or "the hub"
    where = before if before == after else f"{before} -> {after}"
    what = fragment.experts or "no experts"
    if fragment.access_share is not None:
        what += f" ({fragment.access_share:.1%} of accesses)"
    moved = fragment.push_bytes_per_s + fragment.entry_bytes_per_s
    parts = [what, f"{fragment.pushes_per_s:.2f} pushes/s", f"{format_bytes(int(moved))}/s"]
    if fragment.stretch > 1:
        parts.append(f"pushed every {fragment.stretch} intervals")
    return f"fragment {fragment.fragment:<3} {where:12} {', '.join(parts)}"


def _line(place: ShardLoad) -> str:
    name = place.name or "the hub"
    parts = [f"{len(place.fragments)} fragments" if len(place.fragments) != 1 else "1 fragment"]
    if place.fragments:
        parts[0] += f" ({', '.join(str(f) for f in place.fragments)})"
    parts += [f"{place.pushes_per_s:.2f} pushes/s", f"{format_bytes(int(place.bytes_per_s))}/s"]
    return f"{name:12} {', '.join(parts)}" + ("" if place.is_present else "  (does not answer)")
