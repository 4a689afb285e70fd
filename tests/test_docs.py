"""The pages for users are right: every snippet runs, in the order of its page, and links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
SNIPPETS = {path.name: found for path in sorted(DOCS.glob("*.md"))
            if (found := re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))}


def test_pages_with_snippets_are_found():
    assert {"jit.md", "serving.md", "torch.md", "training.md"} <= set(SNIPPETS)


@pytest.mark.slow
@pytest.mark.parametrize("page", SNIPPETS)
def test_the_snippets_run_in_order(page):
    torch._dynamo.reset()
    names = {}
    for number, snippet in enumerate(SNIPPETS[page], 1):
        exec(compile(snippet, f"docs/{page}, snippet {number}", "exec"), names)


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    text = (DOCS / page).read_text()
    headings = {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")
                for line in text.splitlines() if line.startswith("#")}
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        assert target.startswith("http") or not target or (DOCS / target).exists(), target
        assert target or anchor in headings, f"#{anchor}"
