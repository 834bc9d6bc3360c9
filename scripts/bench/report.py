"""`python -m scripts.bench.report FILE`: renew the tables of a page from docs/results/*.json, between its `<!-- results:NAME -->` marks."""

import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def table(result: dict) -> str:
    """One results file as a Markdown table, under a line that says what it was measured on."""
    versions, ceilings = (", ".join(f"{name} {value}" for name, value in result[part].items()) for part in ("versions", "ceilings"))
    lines = [
        f"{result['machine']}, commit {result['commit']}, {result['date']}; {versions}; ceilings of the same run: {ceilings}.",
        "",
        "| what | p50 | p10 to p90 | unit | TFLOP/s | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        values = (row["name"], f"{row['p50']:.4g}", f"{row['p10']:.4g} to {row['p90']:.4g}", row["unit"])
        lines.append("| " + " | ".join((*values, str(row.get("tflops", "")), str(row.get("peak_gib", "")))) + " |")
    return "\n".join(lines)


def renew(page: str) -> str:
    """The page with every marked table made anew."""

    def fill(match: re.Match) -> str:
        result = json.loads((RESULTS / f"{match[1]}.json").read_text())
        return f"<!-- results:{match[1]} -->\n{table(result)}\n<!-- /results -->"

    return re.sub(r"<!-- results:([\w-]+) -->\n.*?<!-- /results -->", fill, page, flags=re.S)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(renew(page.read_text()))
