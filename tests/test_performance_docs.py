"""Tables of results in the docs are what the results files say."""

from pathlib import Path

from scripts.bench.report import renew

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def test_tables_are_made_from_the_results():
    text = PAGE.read_text()
    assert "| attention_fwd_1024x2663 |" in text
    assert renew(text) == text, "run: python -m scripts.bench.report docs/performance.md"
