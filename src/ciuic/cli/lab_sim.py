"""`ciuic lab sim`: the hub's machines against many simulated nodes in virtual time."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ciuic.cli.output import Grid, JsonOption, print_facts, print_grid, print_json, print_line, print_note

if TYPE_CHECKING:
    from ciuic.lab.sim import SimResult

FAILED = 7


def sim(
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds' worth of samples.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="One seed gives one story.")] = 0,
    profile: Annotated[
        str, typer.Option(help="Nodes, links and failures: homogeneous, continents or flapping.")
    ] = "continents",
    faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Let nodes, links and the hub fail.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth/--no-growth", help="Measure also with a tenth and a hundredth of the nodes.")
    ] = True,
    as_json: JsonOption = False,
) -> int:
    """Run the hub's real code against simulated nodes.

    Virtual time: no sockets, no waiting. Ends with a proof; the exit code is 7 when an invariant does not hold.
    """
    from ciuic.lab.sim import SimConfig, growth_sizes, simulate

    sizes = growth_sizes(nodes) if growth else [nodes]
    results: list[SimResult] = []
    for size in sizes:
        if not as_json:
            print_note(f"simulating {size:,} node{'s' if size > 1 else ''} ...")
        results.append(simulate(SimConfig(nodes=size, rounds=rounds, seed=seed, profile=profile, faults=faults)))
    if as_json:
        print_json(to_json(results))
    else:
        _show(results)
    return 0 if all(result.proof.all_hold for result in results) else FAILED


def to_json(results: "list[SimResult]") -> dict[str, Any]:
    """What `--json` prints; the last result is that of the size that was asked for."""
    from ciuic.lab.sim import growth_exponent

    main = results[-1]
    return {
        "nodes": main.config.nodes,
        "rounds": main.versions,
        "rounds_asked": main.config.rounds,
        "profile": main.config.profile,
        "seed": main.config.seed,
        "faults": main.config.faults,
        "events": main.events,
        "events_per_s": round(main.events_per_s),
        "cpu_s": round(main.cpu_s, 2),
        "virtual_s": round(main.virtual_s, 1),
        "cost_per_round_growth": round(growth_exponent({x.config.nodes: x.round_s for x in results}), 3),
        "cost_per_round_s": {str(x.config.nodes): round(x.round_s, 6) for x in results},
        "samples": main.proof.samples,
        "troubles": main.troubles,
        "story": main.story,
        "story_digest": main.story_digest,
        "invariants_hold": all(x.proof.all_hold for x in results),
        "invariants": main.proof.holds,
        "problems": [problem for x in results for problem in x.proof.problems],
    }


def _show(results: "list[SimResult]") -> None:
    from ciuic.lab.sim import growth_exponent

    print_grid(
        Grid(
            columns=("nodes", "rounds", "virtual time", "events", "processor time", "events/s", "per round"),
            rows=[
                (
                    f"{x.config.nodes:,}",
                    f"{x.versions:,}",
                    f"{x.virtual_s:,.0f} s",
                    f"{x.events:,}",
                    f"{x.cpu_s:.1f} s",
                    f"{x.events_per_s:,.0f}",
                    f"{1000 * x.round_s:.1f} ms",
                )
                for x in results
            ],
        )
    )
    main = results[-1]
    samples = main.proof.samples
    facts = [
        ("troubles", ", ".join(f"{count} {name}" for name, count in sorted(main.troubles.items())) or "none"),
        (
            "samples",
            f"{samples['committed']:,} of {samples['total']:,} committed, {samples['lost']} lost, "
            f"{samples['duplicated']:,} trained twice",
        ),
        ("story", f"{sum(main.story.values()):,} lines, digest {main.story_digest[:12]}"),
    ]
    if len(results) > 1:
        exponent = growth_exponent({x.config.nodes: x.round_s for x in results})
        facts.insert(0, ("growth", f"the cost of a round grows with nodes^{exponent:.2f} (1 is linear)"))
    count = len(main.proof.holds)
    broken = [problem for x in results for problem in x.proof.problems]
    facts.append(("invariants", f"all {count} hold" if not broken else f"{len(broken)} broken"))
    print_line("")
    print_facts(facts)
    for problem in broken:
        print_line(f"  {problem}")
