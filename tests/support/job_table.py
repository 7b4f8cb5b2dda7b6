"""The tables of docs/reference/job.md, made from the job's own classes."""

from ciuic.job import Job, Section


def sections() -> dict[str, type[Section]]:
    found = {}
    for name, field in Job.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = field.annotation
    return found


def rows(section: type[Section]) -> list[str]:
    """One Markdown row per field: name, default, what it is."""
    default = section()
    lines = []
    for name, field in section.model_fields.items():
        value = getattr(default, name)
        text = " ".join((field.description or "").split())
        lines.append(f"| `{name}` | {_toml(value)} | {text} |")
    return lines


def _toml(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return "`{}`" if value == {} else f"`{value}`"
