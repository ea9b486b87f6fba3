"""README.md and the other pages: their files exist, their tables are those of plots/data."""

import re
from pathlib import Path

import pytest
import reproduce
import side_by_side

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT) for folder in (".", "plots", "plots/data", "tests/benchmarks")
               for path in (ROOT / folder).glob("*.md"))  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_exist(page):
    text = (ROOT / page).read_text()
    links = re.findall(r'(?:\]\(|src=")((?!http|#)[^)"#]+)', text)
    named = re.findall(r"\b(?:plots|tests)/(?:\w+/)*\w+\.(?:py|pt)", text)
    for path in [*((ROOT / page).parent / link for link in links), *map(ROOT.joinpath, named)]:
        assert path.exists(), path


def test_the_page_and_the_links_to_lines_are_up_to_date():
    """Else: .venv/bin/python plots/side_by_side.py"""
    side_by_side.main(["--check"])


def test_tables_of_results_are_those_of_the_data(tmp_path):
    """Else: .venv/bin/python plots/reproduce.py EXPERIMENT --draw-only"""
    found = {"results": reproduce.markdown(reproduce.top_table())}
    for experiment in reproduce.EXPERIMENTS:
        if runs := reproduce.data_of(experiment):
            found |= reproduce.tables(experiment, runs)
    pages = [ROOT / "README.md", ROOT / "plots/README.md", ROOT / "plots/lessons.md"]
    texts = [page.read_text() for page in pages]
    copies = [tmp_path / str(k) for k in range(len(pages))]
    for copy, text in zip(copies, texts, strict=True):
        copy.write_text(text)
    reproduce.write_tables(found, copies)
    assert [copy.read_text() for copy in copies] == texts
    marked = re.findall(r"<!-- (?!end)([\w-]+) -->\n\|", "".join(texts))
    assert set(marked) == found.keys()
