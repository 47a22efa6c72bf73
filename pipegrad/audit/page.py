"""Page: a report as one HTML file, without scripts and without anything from a network."""

from __future__ import annotations

import html
from string import Template

from pipegrad.audit.report import Finding, Gradient, Report, listed
from pipegrad.printable import printable_lines

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #8884; --bad: #c0392b; --good: #2e7d4f; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
h1 .right { color: var(--good); } h1 .wrong { color: var(--bad); }
section { border-left: 3px solid var(--bad); padding-left: 1rem; margin: 1.2rem 0; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .1rem 1rem; margin: .4rem 0; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; white-space: nowrap; }
.bar { display: inline-block; height: .6rem; background: var(--good); }
tr.wrong .bar { background: var(--bad); }
</style>
</head>
<body>
<h1>pipegrad audit: <span class="$verdict">$title</span></h1>
$findings
$notes
$gradients
</body>
</html>
""")


def _text(text: str) -> str:
    return html.escape(printable_lines(text))


def as_html(report: Report) -> str:
    """Returns a report as a page."""
    worst = sorted(report.gradients, key=lambda one: -one.error / one.allowed)
    return _PAGE.substitute(
        title=_text(report.summary),
        verdict="right" if report.is_right else "wrong",
        findings="\n".join(map(_finding, report.findings)),
        notes=_list(report.notes),
        gradients=_table(worst) if worst else "",
    )


def _finding(finding: Finding) -> str:
    rows = {
        "step": str(finding.step),
        "ranks": listed(finding.ranks),
        "parameters": ", ".join(finding.names),
        "found": "; ".join(finding.details),
        "what to do": finding.advice,
    }
    listing = "".join(
        f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in rows.items() if value
    )
    return f"<section><strong>{_text(finding.cause)}</strong><dl>{listing}</dl></section>"


def _list(notes: tuple[str, ...]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<h2>Notes</h2><ul>{items}</ul>"


def _table(gradients: list[Gradient]) -> str:
    rows = "".join(map(_row, gradients))
    return (
        "<h2>Gradients of the last step, the worst first</h2><table><thead><tr><th>parameter</th>"
        "<th>ranks</th><th>error</th><th>allowed</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _row(gradient: Gradient) -> str:
    width = 6 * min(1.0, gradient.error / gradient.allowed)  # rem
    mark = "right" if gradient.error <= gradient.allowed else "wrong"
    return (
        f"<tr class='{mark}'><td>{_text(gradient.name)}</td>"
        f"<td>{listed(gradient.ranks)}</td><td class='number'>{gradient.error:.2g}</td>"
        f"<td class='number'>{gradient.allowed:.2g}</td>"
        f"<td><span class='bar' style='width:{width:.2f}rem'></span></td></tr>"
    )
