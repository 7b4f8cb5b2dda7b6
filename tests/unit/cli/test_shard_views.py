"""What `ciuic hub shards` prints."""

from ciuic.cli.shard_views import shard_lines
from ciuic.net.shard_messages import FragmentLoad, ShardLoad, ShardsInfo


def load(name: str, *fragments: int, **more: object) -> ShardLoad:
    moved = 1000.0 * len(fragments)
    return ShardLoad(name=name, fragments=list(fragments), bytes_per_s=moved, pushes_per_s=2.0, **more)


def test_the_load_before_and_after_and_how_to_get_there() -> None:
    info = ShardsInfo(
        run_id="r-1",
        places=[load("", 0), load("s1", 1, 2), load("s2")],
        planned=[load("", 0), load("s1", 1), load("s2", 2)],
        moves=[(2, "s2")],
    )
    lines = shard_lines(info, started=False)
    assert lines[0].startswith("the hub")
    assert "2 fragments (1, 2)" in lines[1]
    assert lines.index("after the moves:") == 4
    assert "1 fragment (2)" in lines[7]
    assert lines[-1] == "better: fragment 2 to s2 (ciuic hub shards r-1 --rebalance)"


def test_each_fragment_of_a_mixture_has_a_line_with_its_experts_and_where_it_goes() -> None:
    rates = {"elements": 5, "pushes_per_s": 2.0, "push_bytes_per_s": 600.0, "entry_bytes_per_s": 400.0}
    fragments = [
        FragmentLoad(fragment=0, shard="", **rates),
        FragmentLoad(fragment=1, shard="s1", planned_shard="s1", experts="experts 0-3", access_share=0.625, **rates),
        FragmentLoad(fragment=2, shard="s1", planned_shard="s2", experts="experts 4-7", stretch=3, **rates),
    ]
    places = [load("", 0), load("s1", 1, 2), load("s2")]
    info = ShardsInfo(run_id="r", places=places, planned=places, fragments=fragments)
    assert shard_lines(info, started=True)[4:] == [
        "fragment 0   the hub      no experts, 2.00 pushes/s, 1.0 kB/s",
        "fragment 1   s1           experts 0-3 (62.5% of accesses), 2.00 pushes/s, 1.0 kB/s",
        "fragment 2   s1 -> s2     experts 4-7, 2.00 pushes/s, 1.0 kB/s, pushed every 3 intervals",
    ]
    plain = ShardsInfo(run_id="r", places=places, planned=places, fragments=fragments[:1])
    assert len(shard_lines(plain, started=True)) == 3


def test_a_shard_that_does_not_answer_and_a_fragment_on_its_way_are_told() -> None:
    places = [load("", 0), load("s1", 1, is_present=False)]
    moving = FragmentLoad(
        fragment=1, shard="s1", elements=5, pushes_per_s=1, push_bytes_per_s=1, entry_bytes_per_s=1, moving_to="s2"
    )
    lines = shard_lines(ShardsInfo(run_id="r", places=places, planned=places, fragments=[moving]), started=True)
    assert lines[1].endswith("(does not answer)")
    assert lines[-1] == "fragment 1 is on its way to s2"
