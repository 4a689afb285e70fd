"""The README's table of kernels is current; as a program this writes it."""

import re
from pathlib import Path

from flashattn import _build

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
KERNELS = re.compile(r"(?<=<!-- kernels:begin -->\n).*?(?=<!-- kernels:end -->)", re.DOTALL)


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
    if "small_tiles" in missing:
        calls = "plain calls of many queries and keys"
    if row.op == "decode" and "own_values" in missing:
        calls = "plain calls with V in the first columns of K, from 320 on in steps of 64"
    elif row.op == "decode" and "few_rows" in missing:
        calls = "plain calls of many queries"
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


def test_the_printed_traffic_is_what_traffic_prints():
    import flashattn

    assert f"```text\n{flashattn.traffic((1, 8192, 1, 64))}\n```" in README.read_text()


if __name__ == "__main__":
    README.write_text(KERNELS.sub(lambda _: kernel_table(), README.read_text()))
