"""The README is current: its table of kernels, its snippets, its links, and those of the pages in docs/.

As a program it writes the table.
"""

import re
from pathlib import Path

import pytest

from flashattn import _build

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
KERNELS = re.compile(r"(?<=<!-- kernels:begin -->\n).*?(?=<!-- kernels:end -->)", re.DOTALL)
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


def run_snippets(page: str) -> dict:
    """The names that the page's blocks of Python leave, run in order."""
    names = {}
    for snippet in snippets(page):
        exec(compile(snippet, page, "exec"), names)
    return names


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def kernel_table() -> str:
    """csrc/instances.py as a Markdown table; kernels that differ in dtype or tile only share a line."""
    groups = {}
    for row in _build.instances().ROWS:
        machines = ", ".join(row.machines) or "any"
        groups.setdefault((row.op, row.family, machines, row.head_dims, served(row)), []).append(row)
    lines = [("operation", "family", "machines", "head dims", "serves", "dtypes", "kernels"), ("---",) * 7]
    for key, rows in groups.items():
        dtypes = dict.fromkeys(dtype for row in rows for dtype in row.dtypes)
        lines.append((*key, ", ".join(dtypes), str(len(rows))))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def served(row) -> str:
    """What calls a row serves, in words; those of a plain one are explained above the table."""
    missing = set(_build.instances().NEEDS) - set(row.serves)
    if not missing - {"many_queries", "many_rows"}:
        return "every call" if not missing else f"calls of up to {row.rows} queries and heads of a KV head"
    calls = "plain calls" if "many_queries" in row.serves else "plain calls of up to 128 queries"
    return ", ".join([calls, *(name for need, name in {"softcap": "softcap", "alibi": "ALiBi"}.items()
                               if need in row.serves)])


def test_the_table_of_kernels_is_current():
    assert KERNELS.search(README.read_text())[0] == kernel_table(), "run: python tests/test_readme.py"


def test_the_built_kernels_are_in_the_table():
    from flashattn import _load

    rows = _load.extension().instances()
    assert rows
    for row in rows:
        assert f"| {row['op']} | {row['family']} |" in README.read_text()


def test_the_snippets_run_in_order():
    assert len(snippets("README.md")) >= 6
    names = run_snippets("README.md")
    assert names["y"].shape == (2, 100, 512) and names["y"].isfinite().all()
    assert names["lengths"].tolist() == [20, 303]
    assert names["k_cache"][1, 300:303].abs().min() > 0 and not names["k_cache"][1, 303:].any()
    assert names["loss"].isfinite() and names["build"].path.exists()
    assert names["model"].config._attn_implementation == "exact_attention"


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_the_snippets_of_a_page_run(page):
    run_snippets(page)


def test_the_page_on_flash_attention_shows_what_it_says():
    names = run_snippets("docs/flash_attn.md")
    assert names["qkv"].grad.any() and names["padded"].shape == (2, 50, 8, 64)
    assert names["k_cache"][1, 300].all() and not names["k_cache"][1, 301:].any()
    assert (names["both"] - names["out"]).abs().max() < 1e-5
    assert names["step"].shape == (2, 1, 16, 512) and names["latent"][1, 40].all()


def test_the_printed_traffic_is_what_traffic_prints():
    import flashattn

    assert f"```text\n{flashattn.traffic((1, 8192, 1, 64))}\n```" in README.read_text()


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), target


if __name__ == "__main__":
    README.write_text(KERNELS.sub(lambda _: kernel_table(), README.read_text()))
