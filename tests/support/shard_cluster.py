"""A Cluster with shards: processes of their own that keep their folder and port over all their starts."""

import subprocess
import sys
from pathlib import Path

from cluster import Cluster, Process, wait_for

from ciuic.errors import CiuicError
from ciuic.net.shard_messages import ShardsInfo


class Shard:
    """One shard over all its starts."""

    def __init__(self, cluster: "ShardCluster", name: str) -> None:
        self.cluster, self.name, self.port = cluster, name, 0
        self.starts: list[Process] = []

    def start(self, *, reached_at: str = "127.0.0.1") -> "Shard":
        """The first time on any free port, later on the same one; another address of this machine may be given."""
        join = [] if self.starts else ["--join", self.cluster.token(role="shard")]
        home = self.cluster.folder / f"shard-{self.name}"
        arguments = ["hub", "shard", "--name", self.name, "--host", reached_at, "--port", str(self.port)]
        log = self.cluster.folder / f"shard-{self.name}-{len(self.starts)}.log"
        arguments += ["--home", str(home), *join]
        self.starts.append(Process(self.name, log, arguments, self.cluster.environment()))
        wait_for(lambda: " ready at " in self.process.said() or not self.process.is_alive, f"shard {self.name}")
        if not self.process.is_alive:
            raise AssertionError(f"{self.name} did not start: {self.process.said()}")
        self.port = int(self.process.said().split(" ready at ")[1].split()[0].rsplit(":", 1)[1])
        return self

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def process(self) -> Process:
        return self.starts[-1]

    def folders(self, run_id: str) -> list[str]:
        """The fragments whose files it has."""
        home = self.cluster.folder / f"shard-{self.name}" / "shards" / self.name / "runs" / run_id
        return sorted(path.name for path in home.glob("fragment-*"))


class ShardCluster(Cluster):
    """See the module."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.shards: dict[str, Shard] = {}

    def add_shards(self, *names: str) -> list[Shard]:
        """Start shards one after the other."""
        for name in names:
            self.shards[name] = Shard(self, name).start()
        return [self.shards[name] for name in names]

    def places(self, run_id: str) -> ShardsInfo:
        return self.operator.call("GET", f"/v1/runs/{run_id}/shards", None, ShardsInfo)

    def owners(self, run_id: str) -> list[str]:
        """Who serves each fragment; empty before the run has begun."""
        try:
            return [fragment.shard for fragment in self.places(run_id).fragments]
        except CiuicError:
            return []

    def rebalance(self, run_id: str) -> ShardsInfo:
        return self.operator.call("POST", f"/v1/runs/{run_id}/rebalance", None, ShardsInfo)

    def command(self, *arguments: str) -> str:
        """What a command of the operator prints."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ciuic.cli.main", *arguments],
            env=self.environment(CIUIC_HOME=str(self.home)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        return done.stdout

    def _end_all(self) -> list[str]:
        for shard in self.shards.values():
            for process in shard.starts:
                process.kill()
        return super()._end_all()
