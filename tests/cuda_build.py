"""Run by cuda_build.sh: what an installed CUDA build must be able to do without a GPU."""

import torch

import flashattn
from compare import check_backward, check_decode, check_forward
from flashattn import _build, _load, dispatch

CHIPS = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB of shared memory a block may have


def serving(chip: int, op: str, dtype: str, head_dim: int, needs: tuple[str, ...] = ()) -> str | None:
    rows = _load.extension().candidates(op, "cuda", dtype, head_dim, head_dim, needs, chip, CHIPS[chip] << 10)
    return next((name for name, why_not in rows if not why_not), None)


extension = _load.extension()
images = extension.build_info()["cuda"]
assert images and dispatch.families()[: len(images)] == sorted(images, reverse=True), images
table = _build.instances()
built = [row["name"] for row in extension.instances() if row["device"] == "cuda"]
assert sorted(built) == sorted(row.name for row in table.ROWS if row.module in images)

for chip in CHIPS:
    if serving(chip, "forward", "float32", 64) is None:
        print(f"compute capability {chip / 10}: no image")
        continue
    for op in ("forward", "backward"):
        for dtype in table.DTYPES:
            chosen = [serving(chip, op, dtype, head_dim, needs) for head_dim in (64, 128, 256)
                      for needs in ((), ("many_queries",), ("softcap",), table.NEEDS)]
            assert all(chosen), (chip, op, dtype, chosen)
            print(f"compute capability {chip / 10}, {op} {dtype}: {', '.join(dict.fromkeys(chosen))}")

q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
for check in (check_forward, check_backward, check_decode):
    check(q, k, v, causal=True)
print(f"{flashattn.__version__} in {flashattn.__file__}: {images}; the CPU is served")
