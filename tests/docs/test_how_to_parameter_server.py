"""The program of the page runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "parameter-server.md"


def test_the_first_program_of_the_page_runs() -> None:
    program = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[0]
    exec(compile(program, str(PAGE), "exec"), {"__name__": "page"})
