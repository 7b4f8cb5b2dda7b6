"""Places of a run whose node is gone: who may have them. Pure.

Only runs with a largest number of nodes have places; one without takes every node that suits in any case.

    spare   a place is for whoever is free, at once
    wait    a dead node's place is kept for it for a while, then it is for whoever is free
    never   a place is kept for its node, whatever happens

A node that says goodbye, is evicted or whose worker failed for good is not waited for.
"""

from ciuic.hub.membership.records import Announce, Effects, Moment, Node, Run
from ciuic.units import format_duration


class Vacancies:
    """Remembers since when places are kept; the rest is in the run's row. A restart of the hub begins the wait anew."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, str], float] = {}
        self._said: dict[str, str] = {}

    def lose(self, run: Run, node: Node, out: Effects) -> None:
        """The node is out of the run."""
        if run.state != "running" or run.max_nodes is None:
            return
        may_return = node.presence == "dead" and node.node_id not in run.failed
        if run.replace == "never" or (run.replace == "wait" and may_return):
            run.away = [*run.away, node.node_id]
            long = "" if run.replace == "never" else f" for {format_duration(run.replace_after_s)}"
            text = f"the place of {node.node_id} in {run.run_id} is kept for it{long}"
            out.add(Announce(kind="run.place_kept", run_id=run.run_id, node_id=node.node_id, text=text))
        else:
            run.gaps = [*run.gaps, node.node_id]
        out.save_run(run)

    def take(self, run: Run, node: Node, out: Effects) -> str:
        """The node comes into the running run: in whose place, as a sentence."""
        name = node.node_id
        self._until_s.pop((run.run_id, name), None)
        if name in run.away or name in run.gaps:
            run.away, run.gaps = _without(run.away, name), _without(run.gaps, name)
            text = f"{name} is back in {run.run_id}"
        elif run.gaps:
            lost, run.gaps = run.gaps[0], run.gaps[1:]
            text = f"{name} takes the place of {lost} in {run.run_id}"
        else:
            return f"{name} was added to {run.run_id}"
        out.save_run(run)
        return text

    def tick(self, now: Moment, run: Run, out: Effects) -> None:
        """Let time pass: a place is not kept for ever."""
        if run.replace != "wait":
            return
        for name in list(run.away):
            until_s = self._until_s.setdefault((run.run_id, name), now.mono_s + run.replace_after_s)
            if now.mono_s < until_s:
                continue
            del self._until_s[run.run_id, name]
            run.away, run.gaps = _without(run.away, name), [*run.gaps, name]
            out.save_run(run)
            text = f"{name} did not come back within {format_duration(run.replace_after_s)}: its place is free"
            out.add(Announce(kind="run.place_free", run_id=run.run_id, node_id=name, text=text))

    def say_open(self, run: Run, refused: list[str], out: Effects) -> None:
        """Tell once that nobody can take a place."""
        text = ""
        if run.gaps:
            text = f"no free node can take the place of {', '.join(run.gaps)} in {run.run_id}"
            text += f"; not taken: {'; '.join(refused[:8])}" if refused else ""
        gaps = ", ".join(run.gaps)
        if self._said.get(run.run_id, "") != gaps:
            self._said[run.run_id] = gaps
            if text:
                out.add(Announce(kind="run.no_spare", run_id=run.run_id, text=text))

    def forget(self, run: Run) -> None:
        """The run begins (again) with the nodes that are there."""
        run.away, run.gaps = [], []
        self._said.pop(run.run_id, None)
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if key[0] != run.run_id}


def room(run: Run, members: int) -> int | None:
    """How many more nodes may come in, besides those whose place is kept; None: any number."""
    return None if run.max_nodes is None else max(0, run.max_nodes - members - len(run.away))


def _without(names: list[str], name: str) -> list[str]:
    return [other for other in names if other != name]
