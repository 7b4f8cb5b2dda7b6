"""`ciuic bench learning`: search, what is kept, what is reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from ciuic.bench import Table, learning, learning_search
from ciuic.bench.__main__ import main
from ciuic.bench.learning_page import BEGIN, END, write_page
from ciuic.bench.learning_plan import ALL, Item, choose
from ciuic.bench.learning_results import GAPS, gaps, order, scores
from ciuic.bench.learning_search import RATES, Orders, Rows, Worker, climb, run_items
from ciuic.bench.learning_trial import Setting, Trial
from ciuic.errors import UsageError


def fake_row(trial: Trial) -> dict[str, Any]:
    """Best at 6e-3 and, for Muon, at 8 times that."""
    far = abs(RATES.index(trial.lr) - RATES.index(6e-3)) + abs(trial.multiplier - 8 * (trial.multiplier > 0)) / 8
    loss = 2.0 + far / 10 + trial.seed / 100
    setting = trial.setting
    return {
        "name": setting.name, "mode": setting.mode, "lr": trial.lr, "muon_multiplier": trial.multiplier,
        "seed": trial.seed, "losses": [3.0, 2.5, 2.2, loss], "loss": loss, "sent_bytes": 1000,
        "bytes_below_ddp": 2.0, "took_s": 0.1, "key": trial.key(),
    }  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Runs that were really started."""
    started: list[Trial] = []

    def run(trial: Trial) -> dict[str, Any]:
        started.append(trial)
        return fake_row(trial)

    monkeypatch.setattr(learning_search, "run_trial", run)
    return started


@pytest.mark.parametrize("best", range(len(RATES)))
def test_the_search_finds_the_best_rate_wherever_it_is(best: int) -> None:
    asked: list[float] = []

    def score(rate: float) -> float:
        asked.append(rate)
        return abs(RATES.index(rate) - best)

    assert climb(RATES, 6e-3, score) == RATES[best]
    for near in (best - 1, best + 1):
        assert not 0 <= near < len(RATES) or RATES[near] in asked


def test_a_search_tries_both_neighbours_then_the_other_seeds(tmp_path: Path, trained: list[Trial]) -> None:
    items = choose(["onebit-h5"])
    rows, rates = run_items(items, Orders(path=tmp_path / "rows.jsonl", seeds=3, verbose=False), 1)
    assert rates == {"onebit-h5": (6e-3, 0.0)}
    assert {(t.lr, t.seed) for t in trained} == {(8e-3, 0), (6e-3, 0), (4e-3, 0), (6e-3, 1), (6e-3, 2)}
    assert len(rows) == len(trained)


def test_muon_is_tuned_over_two_rates(tmp_path: Path, trained: list[Trial]) -> None:
    _, rates = run_items(choose(["muon-ddp"]), Orders(path=tmp_path / "rows.jsonl", seeds=1, verbose=False), 1)
    assert rates == {"muon-ddp": (6e-3, 8.0)}


def test_what_was_run_is_not_run_again(tmp_path: Path, trained: list[Trial]) -> None:
    orders = Orders(path=tmp_path / "rows.jsonl", seeds=2, verbose=False)
    first = run_items(choose(["ddp"]), orders, 1)
    count = len(trained)
    again = run_items(choose(["ddp"]), orders, 1)
    assert len(trained) == count
    assert sorted(map(str, again[0])) == sorted(map(str, first[0]))


def test_a_torn_last_line_costs_one_run(tmp_path: Path, trained: list[Trial]) -> None:
    orders = Orders(path=tmp_path / "rows.jsonl", seeds=1, verbose=False)
    run_items(choose(["ddp"]), orders, 1)
    count = len(trained)
    text = orders.path.read_text()
    orders.path.write_text(text[:-20])
    run_items(choose(["ddp"]), orders, 1)
    assert len(trained) == count + 1
    assert len(Rows(orders.path)) == count


def test_cached_runs_nothing(tmp_path: Path, trained: list[Trial]) -> None:
    orders = Orders(path=tmp_path / "rows.jsonl", seeds=1, cached=True, verbose=False)
    assert run_items(choose(["ddp", "onebit-h1"]), orders, 1) == ([], {})
    assert trained == []


def test_a_screened_setting_takes_the_rate_of_its_neighbour(tmp_path: Path, trained: list[Trial]) -> None:
    orders = Orders(path=tmp_path / "rows.jsonl", seeds=3, verbose=False)
    _, rates = run_items(choose(["onebit-h1", "onebit-h5"]), orders, 1)
    assert rates["onebit-h1"] == rates["onebit-h5"]
    assert [t.seed for t in trained if t.setting.name == "onebit-h1"] == [0]


def test_the_key_of_a_run_ignores_its_name_and_nothing_else() -> None:
    setting = Setting(name="a", mode="ddp")
    trial = Trial(setting=setting, lr=1e-3, multiplier=0.0, seed=0)
    assert trial.key() == Trial(setting=Setting(name="b", mode="ddp"), lr=1e-3, multiplier=0.0, seed=0).key()
    others = [
        Trial(setting=setting, lr=2e-3, multiplier=0.0, seed=0),
        Trial(setting=setting, lr=1e-3, multiplier=1.0, seed=0),
        Trial(setting=setting, lr=1e-3, multiplier=0.0, seed=1),
        Trial(setting=Setting(name="a", mode="ddp", warmup=41), lr=1e-3, multiplier=0.0, seed=0),
    ]
    assert len({trial.key(), *(other.key() for other in others)}) == 5


def test_every_gap_names_settings_of_the_plan() -> None:
    names = {item.setting.name for item in ALL}
    assert len(names) == len(ALL)
    for pair in GAPS.values():
        assert {*pair, *(f"{part}-moe" for part in pair)} <= names


def scored(losses: dict[str, list[float]]) -> tuple[list[Item], dict[str, Any]]:
    items = choose(list(losses))
    rows = [
        fake_row(Trial(setting=item.setting, lr=8e-3, multiplier=0.0, seed=seed))
        | {"loss": loss, "losses": [3.0, 2.5, 2.2, loss]}
        for item in items
        for seed, loss in enumerate(losses[item.setting.name])
    ]
    return items, scores(items, rows, dict.fromkeys(losses, (8e-3, 0.0)))


def test_a_gap_is_the_difference_of_the_means_over_seeds() -> None:
    _, found = scored({"ddp": [2.0, 2.2], "onebit-h5": [2.2, 2.3], "none-h5-moe": [2.0], "onebit-h5-moe": [2.5]})
    result = gaps(found)
    assert result["onebit_h5_minus_ddp_adamw"] == pytest.approx(0.15)
    assert result["onebit_h5_minus_uncompressed"] is None
    assert result["onebit_h5_minus_uncompressed_moe"] == pytest.approx(0.5)


def test_a_reversed_order_is_named_and_small_differences_do_not_count() -> None:
    items, found = scored({"ddp": [2.0], "onebit-h5": [2.2], "none-h5": [2.3]})
    assert order(items, found) == {"ordering_holds": True, "ordering_pairs": 2, "ordering_differs": []}
    items, found = scored({"ddp": [2.4], "onebit-h5": [2.2]})
    result = order(items, found)
    assert result["ordering_holds"] is False
    assert "ddp - onebit-h5" in result["ordering_differs"][0]


def test_a_run_that_diverged_has_no_gap_and_comes_last() -> None:
    items = choose(["ddp", "onebit-h5"])
    rows = [fake_row(Trial(setting=items[0].setting, lr=8e-3, multiplier=0.0, seed=0))]
    rows[0] |= {"loss": None, "losses": [3.0, None, None, None]}
    result = learning.report(items, rows, {items[0].setting.name: (8e-3, 0.0)})
    assert result["settings"][0]["loss"] is None
    assert "diverged" in "\n".join(line for table in learning.tables(result) for line in table.lines())
    json.dumps(result, allow_nan=False)


def test_quick_runs_everything_once_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learning", "--quick", "--json", "--folder", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {line["name"] for line in result["settings"]} == set(learning_quick_names())
    losses = {row["name"]: row["losses"] for row in result["rows"]}
    assert all(first > last > 1.0 for first, *_, last in losses.values())
    assert result["bytes_below_ddp"]["none-h5"] == pytest.approx(5, rel=0.01)
    assert result["bytes_below_ddp"]["onebit-h5"] > 130
    assert result["quadratic_feedback_error"] < 0.01 < result["quadratic_naive_error"]
    assert (tmp_path / "learning.png").stat().st_size > 10_000
    assert main(["learning", "--quick", "--cached", "--folder", str(tmp_path)]) == 0
    assert "bytes below DDP" in capsys.readouterr().out


def learning_quick_names() -> tuple[str, ...]:
    return "ddp", "none-h5", "onebit-h5", "gradient-int4", "onebit-h5-moe"


def test_the_tables_of_a_page_are_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    table = Table(title="Losses", columns=("setting", "loss"), rows=[("ddp", "2.0")], note="note")
    write_page(page, [table], "facts")
    write_page(page, [table], "facts")
    text = page.read_text()
    assert "old" not in text
    assert "| ddp | 2.0 |" in text
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    page.write_text("no marks")
    with pytest.raises(UsageError, match="no place"):
        write_page(page, [table], "facts")


def test_a_setting_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learning", "--only", "three-bit", "--folder", str(tmp_path)]) == 2
    assert "onebit-h5" in capsys.readouterr().err


def test_a_worker_says_what_it_does(tmp_path: Path, trained: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(Orders(path=tmp_path / "rows.jsonl", seeds=1))
    worker.trial(Setting(name="ddp", mode="ddp"), (8e-3, 0.0), 0)
    assert capsys.readouterr().err.startswith("ddp: lr 0.008 seed 0: 2.1")
