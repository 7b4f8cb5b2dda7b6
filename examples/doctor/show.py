"""Runs the scripts of this folder, plain and under the doctor, and shows what torch says and what the doctor says.

python examples/doctor/show.py                               all of them, on the screen
python examples/doctor/show.py reduced_twice                 one of them
python examples/doctor/show.py --write docs/explanation/doctor-cases.md    put into the page, where it names them
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TWICE = ("resumed_without_moments",)
"""Scripts that show something at their second start."""
PLAIN = "torchrun --nproc-per-node 2 {script}"
FOUND = 7
"""Exit code of `ciuic doctor run` when the program succeeded and something critical was found."""
UNDER = "ciuic doctor run -- torchrun --nproc-per-node 2 {script}"


def show(name: str) -> str:
    """Markdown: the script, what torch says, what the doctor says."""
    script = HERE / f"{name}.py"
    shown = f"examples/doctor/{name}.py"
    starts = 2 if name in TWICE else 1
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as under:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        said = [_run(torchrun, plain, codes=(0,)) for _ in range(starts)][-1]
        doctor = [sys.executable, "-m", "ciuic.cli.main", "doctor"]
        for number in range(starts):
            folder = f"{under}/doctor-{number}"
            _run([*doctor, "run", "--folder", folder, "--", *torchrun], under, codes=(0, FOUND))
        found = _run([*doctor, "report", folder], under, codes=(0,))
    again = "a second time" if starts == 2 else ""
    return "\n".join(
        (
            f"```python title={shown!r}".replace("'", '"'),
            script.read_text().rstrip(),
            "```",
            "",
            f"```console title={_title('what torch says', again)}",
            f"$ {PLAIN.format(script=shown)}",
            said.rstrip(),
            "```",
            "",
            f"```console title={_title('what the doctor says', again)}",
            f"$ {UNDER.format(script=shown)}",
            found.rstrip(),
            "```",
        )
    )


def _title(words: str, again: str) -> str:
    return f'"{words}, {again}"' if again else f'"{words}"'


def _run(command: list[str], folder: str, *, codes: tuple[int, ...]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode not in codes:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def write(page: Path) -> None:
    """Replace what stands between `<!-- show NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text()
    for name in re.findall(r"<!-- show (\w+) -->", text):
        begins, ends = f"<!-- show {name} -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begins)
        tail = rest.partition(ends)[2]
        text = f"{head}{begins}\n\n{show(name)}\n\n{ends}{tail}"
        print(f"{name}: shown")
    page.write_text(text)


def main(words: list[str]) -> None:
    if words[:1] == ["--write"]:
        write(Path(words[1]))
        return
    for name in words or sorted(path.stem for path in HERE.glob("*.py") if path.stem != "show"):
        print(show(name), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
