"""The README and the pages of docs/ are right: snippets run, in the order of their page, and show what it
says; links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))]


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def the_readme(names):
    assert names["y"].shape == (2, 100, 512) and names["y"].isfinite().all()
    assert names["lengths"].tolist() == [20, 303]
    assert names["k_cache"][1, 300:303].abs().min() > 0 and not names["k_cache"][1, 303:].any()
    assert names["loss"].isfinite() and names["build"].path.exists()
    assert names["model"].config._attn_implementation == "exact_attention"


def flash_attn(names):
    assert names["qkv"].grad.any() and names["padded"].shape == (2, 50, 8, 64)
    assert names["k_cache"][1, 300].all() and not names["k_cache"][1, 301:].any()
    assert (names["both"] - names["out"]).abs().max() < 1e-5
    assert names["step"].shape == (2, 1, 16, 512) and names["latent"][1, 40].all()


def transformers(names):
    assert names["model"].config._attn_implementation == "exact_attention"
    assert names["embeddings"].shape == (2, 384) and names["loss"].isfinite()
    assert names["tokens"].shape[1] == 20


SHOWN = {"README.md": the_readme, "docs/flash_attn.md": flash_attn, "docs/transformers.md": transformers}


def test_pages_with_snippets_are_found():
    pages = {page for page in PAGES if snippets(page)}
    assert pages >= {*SHOWN, "docs/jit.md", "docs/serving.md", "docs/torch.md", "docs/training.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_the_snippets_run_in_order(page):
    torch._dynamo.reset()
    names = {}
    for number, snippet in enumerate(snippets(page), 1):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)
    SHOWN.get(page, lambda names: None)(names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    headings = {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")
                for line in text.splitlines() if line.startswith("#")}
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), target
        assert target or anchor in headings, f"#{anchor}"
