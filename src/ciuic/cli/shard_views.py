"""What `ciuic hub shards` prints."""

from ciuic.net.shard_messages import ShardLoad, ShardsInfo
from ciuic.units import format_bytes


def shard_lines(info: ShardsInfo, *, started: bool) -> list[str]:
    """Load per place, before and (when something should move) after; then the moves."""
    lines = [_line(place) for place in info.places]
    if info.moves or info.planned != info.places:
        lines += ["", "after the moves:", *(_line(place) for place in info.planned)]
    lines += [f"fragment {f.fragment} is on its way to {f.moving_to}" for f in info.fragments if f.moving_to]
    if info.moves and not started:
        moves = ", ".join(f"{fragment} to {to}" for fragment, to in info.moves)
        lines += ["", f"better: fragment {moves} (ciuic hub shards {info.run_id} --rebalance)"]
    return lines


def _line(place: ShardLoad) -> str:
    name = place.name or "the hub"
    parts = [f"{len(place.fragments)} fragments" if len(place.fragments) != 1 else "1 fragment"]
    if place.fragments:
        parts[0] += f" ({', '.join(str(f) for f in place.fragments)})"
    parts += [f"{place.pushes_per_s:.2f} pushes/s", f"{format_bytes(int(place.bytes_per_s))}/s"]
    return f"{name:12} {', '.join(parts)}" + ("" if place.is_present else "  (does not answer)")
