"""The built-in trainer in whole runs: DeepSeek in mixed precision, on a Hugging Face data set in local files."""

import json
import random
from pathlib import Path
from typing import Any

from cluster import Cluster
from training_jobs import entries, without_gaps

WORDS = ("hub", "node", "worker", "rank", "job", "run", "round", "base", "push", "entry", "lease", "ledger", "epoch")


def write_data_set(folder: Path) -> None:
    """Two files of lines like {"id": 7, "body": "the node ..."}."""
    folder.mkdir()
    draw = random.Random(3)
    for name in ("one", "two"):
        lines = [{"id": n, "body": " ".join(draw.choices(WORDS, k=12))} for n in range(200)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def small_deepseek(**sections: dict[str, Any]) -> dict[str, Any]:
    layers = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    return {
        "name": "small",
        "model": {"preset": "deepseek-v3-tiny", "overrides": layers, **sections.pop("model", {})},
        "sync": {"interval": 3, "compression": {"up": "1-bit", "down": "int4"}},
        "train": {"samples": 240, "evaluate_every": 5, "evaluate_samples": 16},
        **sections,
    }


def test_mixed_precision_trains_on_a_streamed_and_on_a_loaded_data_set(tmp_path: Path) -> None:
    write_data_set(tmp_path / "texts")
    data = {"hf": str(tmp_path / "texts"), "text_field": "body", "sequence_length": 48, "held_out": 0.1}
    optim = {"batch_size": 4, "gradient_accumulation": 2, "clip": 1.0, "lr": 4e-3}
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b", allow_code=False)
        streamed = small_deepseek(nodes={"min": 2}, data={**data, "streaming": True}, optim={**optim, "amp": "fp16"})
        run = cluster.submit(streamed)
        info = cluster.finished(run)
        losses = [point.loss for point in sorted(info.evaluations, key=lambda point: point.version)]
        print("fp16, streamed:", losses, [(node.node_id, node.step, node.samples) for node in info.nodes])
        assert min(node.pushes_merged for node in info.nodes) >= 1
        assert info.samples.duplicated == 0
        assert without_gaps(entries(cluster, run))
        assert losses[-1] < losses[0] - 0.5
        assert info.loss_consistent is True
        assert "a stream of samples" in cluster.nodes["a"].run_log(run)

        loaded = small_deepseek(
            model={"dtype": "bfloat16"}, nodes={"max": 1}, data=data, optim={**optim, "amp": "bf16"}
        )
        run = cluster.submit(loaded)
        info = cluster.finished(run)
        losses = [point.loss for point in sorted(info.evaluations, key=lambda point: point.version)]
        print("bf16, loaded:", losses, [(node.node_id, node.step, node.samples) for node in info.nodes])
        assert losses[-1] < losses[0] - 0.5
        assert info.samples.duplicated == 0
        (member,) = info.nodes
        assert "360 samples" in cluster.nodes[member.node_id].run_log(run)
        assert 240 / 8 <= member.step <= 240 / 8 + 3  # near the end leases get small, batches too
