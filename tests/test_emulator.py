"""The CUDA kernels without a card: their sources, compiled as C++, on the emulator (tests/emulator/simt.h).

Every kernel's results are compared with the definition in double, for a few dozen calls.  Faults planted in
the sources show that the emulator sees what would go wrong on a card.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
from emulator import build

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are x86-64 code")

HANGS_AFTER = 300  # seconds


def narrowest_rows() -> list[str]:
    """The row with the smallest head dims of each kind of kernel stands for the wider ones."""
    first = {}
    for row in build.cuda_rows():
        kind = re.match(r"(forward|backward|decode)_(sm80_f32|sm80_bf16|sm75_f16_d|sm90_bf16)", row.name)
        if kind:
            first.setdefault((kind[0], row.name.partition("_d")[0], "softcap" in row.serves,
                              "many_queries" in row.serves, getattr(row, "warpgroups", 0),
                              getattr(row, "query_stages", 0) == 1,
                              row.keys if hasattr(row, "bulk_sums") else 0), row.name)
    return list(first.values())


def run(emulator: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(emulator), *arguments], text=True, capture_output=True, timeout=HANGS_AFTER)


def check(row: str, folder: Path) -> None:
    result = run(build.build(folder, f"^{row}$"))
    wrong = [line for line in result.stdout.splitlines() if not line.endswith(" ok")]
    assert result.returncode == 0, "\n".join(wrong)


@pytest.mark.parametrize("row", narrowest_rows())
def test_kernel(row, tmp_path):
    check(row, tmp_path)


@pytest.mark.parametrize("op", ["forward", "backward", "decode"])
def test_expectations(op, tmp_path):
    """Another implementation, the CPU's, has the results that are expected of the kernels."""
    check(f"{op}_cpu_baseline", tmp_path)


def test_every_instruction_is_emulated():
    def functions(path: Path) -> set[str]:
        return set(re.findall(r"^(?:__device__ )?(?:inline )?[\w]+ (\w+)\(", path.read_text(), re.MULTILINE))

    for name in ("common/ptx.cuh", "sm90/ptx.cuh"):
        real = functions(build.CSRC / name)
        assert len(real) > 10
        assert real <= functions(build.HERE / "include" / name)


FORWARD, BACKWARD = (rf"{op}_sm80_bf16_d64_\d+x\d+" for op in ("forward", "backward"))
HOPPER = "forward_sm90_bf16_d64_192x128"
HOPPER_WIDE = r"forward_sm90_bf16_d192v128_\d+x\d+"
HOPPER_PREFILL = r"decode_sm90_bf16_d64_\d+x\d+"
HOPPER_DECODE = r"decode_sm90_bf16_d576v512_\d+x\d+"
HALVES_BACKWARD = r"backward_sm90_bf16_d192v128_\d+x\d+"
WIDE_BACKWARD = r"backward_sm90_bf16_d192_\d+x\d+"
HOPPER_BACKWARD = r"backward_sm90_bf16_d128_\d+x\d+"
HOPPER_GENERAL = r"backward_sm90_bf16_d64_\d+x\d+_general"
DECODE, DECODE_MANY = "decode_sm80_bf16_d64_8x128", "decode_sm80_bf16_d64_64x64"
FAULTS = {  # name: rows, file, text, the text that replaces it
    "no barrier before K": (
        FORWARD, "mma/forward.cuh", "__syncthreads();  // K has landed for all warps; all have read", "//"),
    "no barrier before V": (
        FORWARD, "mma/forward.cuh", "__syncthreads();  // V has landed for all warps", ""),
    "no wait for V": (FORWARD, "mma/forward.cuh", "wait_for_copies<C, 1>();", "wait_for_copies<C, 2>();"),
    "swizzle of another row": (
        FORWARD, "common/tile.cuh", "index ^ swizzle(row)", "index ^ swizzle(row + 1)"),
    "a key too many": (FORWARD, "common/mask.h", "clamp(k - q + right + 1,", "clamp(k - q + right + 2,"),
    "a key too few": (FORWARD, "common/mask.h", "clamp(k - q - left,", "clamp(k - q - left + 1,"),
    "largest score of a part of the row": (
        FORWARD, "common/softmax.cuh", "return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));", "return x;"),
    "sum of a part of the row": (
        FORWARD, "common/softmax.cuh", "return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);", "return x;"),
    "no rescaling": (FORWARD, "mma/forward.cuh", "out.x[m][n][e] *= softmax.rescale[m][half];", ";"),
    "lanes diverge": (
        FORWARD, "common/softmax.cuh", "grown[m][half] = __any_sync(0xFFFFFFFFu, top > before);",
        "grown[m][half] = top > before && __any_sync(0xFFFFFFFFu, top > before);"),
    "no barrier before dS": (BACKWARD, "mma/backward.cuh", "__syncthreads();  // P and dS are there", "//"),
    "no barrier before Q": (BACKWARD, "mma/backward.cuh", "__syncthreads();  // Q and dO have landed", "//"),
    "dK written over K": (BACKWARD, "mma/backward.cuh", "__syncthreads();  // all warps have read K", "//"),
    "no wait for Q": (
        BACKWARD, "mma/backward.cuh", "wait_for_copies<C, 0>();\n    __syncthreads();  // Q and dO",
        "wait_for_copies<C, 1>();\n    __syncthreads();  // Q and dO"),
    "operand of other rows": (
        BACKWARD, "common/tile.cuh", "(lane & 7) + (lane >> 4 << 3), lane >> 3 & 1)",
        "(lane & 7) + (lane >> 3 << 3 & 8), lane >> 4)"),
    "a row too few": (
        BACKWARD, "common/mask.h", "low = key - last_offset + 1", "low = key - last_offset + 2"),
    "delta of half a row": (
        BACKWARD, "any/backward_rows.cuh", "lanes > 0; lanes /= 2) delta +=",
        "lanes > 1; lanes /= 2) delta +="),
    "nobody's turn": (BACKWARD, "mma/backward.cuh", "ptx::red_add_release(counter, 1);", "{}"),
    "no barrier of the warps that share keys": (
        DECODE_MANY, "mma/decode.cuh", "ptx::bar_sync(1 + key_warp, DecodeTiles<C>::kGroupThreads);",
        ";"),
    "lanes that do not wait for the tile": (
        DECODE, "mma/decode.cuh", "if (C::kRowWarps == 1)\n    __syncwarp();",
        "if (C::kRowWarps == 1)\n    ;"),
    "sums written over tiles": (
        DECODE_MANY, "mma/decode.cuh", "__syncthreads();  // all have read their tiles", "//"),
    "a tile that is not awaited": (
        DECODE, "mma/decode.cuh", "wait_for_copies<C, kAhead - 1>();\n        if (step == 0)",
        "wait_for_copies<C, kAhead>();\n        if (step == 0)"),
    "a key too few of a member": (
        DECODE, "common/split.cuh", "min(key(member + 1), work.len_k)",
        "min(key(member + 1), work.len_k - 1)"),
    "a block that takes itself for the last": (
        DECODE, "mma/decode.cuh", "ptx::atom_add_acq_rel(counter, 1) + 1 == p.team.value",
        "ptx::atom_add_acq_rel(counter, 1) + 2 >= p.team.value"),
    "a cluster that does not wait": (
        DECODE, "mma/decode.cuh", "ptx::mbarrier_wait_cluster(tiles.barrier(), 0);", ""),
    "a slice of another block": (
        DECODE, "mma/decode.cuh", "number - to * slice)", "(number - to * slice ^ 1))"),
    "weights that are not transposed": (
        DECODE, "mma/decode.cuh", "ptx::movmatrix_trans(ptx::cvt_pack<C::kDType>(x[0], x[1]))",
        "ptx::cvt_pack<C::kDType>(x[0], x[1])"),
    "a part of the tile that is not merged": (
        DECODE, "common/split.cuh", "shares_.of(behind - 1) - share_ + 1",
        "shares_.of(behind - 1) - share_"),
    "parts of another head": (
        DECODE, "common/split.cuh", "2 * part * static_cast<int>(p.alike.value) - 1", "2 * part - 1"),
    "a key of a page too far": (
        DECODE, "common/cache.cuh", "key - page * static_cast<int>(size.value)",
        "key + 1 - page * static_cast<int>(size.value)"),
    "a new key in another row": (
        DECODE, "any/append.cuh", "move.position = start + place.row;",
        "move.position = start + place.row + 1;"),
    "no barrier before the panels": (
        "forward_sm80_f32_simt", "any/simt_tile.cuh", "__syncthreads();  // both panels are complete", ""),
    "a panel written over the last one": (
        "backward_sm80_f32_simt", "any/simt_tile.cuh", "__syncthreads();  // nobody reads the stage", "//"),
    "a turn that is not passed": (
        HOPPER, "sm90/forward.cuh", "take_turn(), pass_turn();  // every block has one", ""),
    "a tile whose description is overwritten": (
        HOPPER, "sm90/forward.cuh", "work_stage = tile % kWorkStages;", "work_stage = 0;"),
    "a reader that nobody waits for": (
        HOPPER, "sm90/forward.cuh", "mbarrier_init(work_empty(i), kKeyLanes + 1)",
        "mbarrier_init(work_empty(i), 1)"),
    "a page of another box": (
        HOPPER_PREFILL, "sm90/forward.cuh", "rows.find(own, f.page_size)", "rows.find(key, f.page_size)"),
    "boxes of another number of rows": (
        HOPPER_PREFILL, "sm90/launch.cuh", "std::gcd(static_cast<int>(f.page_size.value), C::kKeys)",
        "std::min(static_cast<int>(f.page_size.value), C::kKeys)"),
    "NaN in rows of a box past the end": (
        HOPPER_PREFILL, "sm90/forward.cuh", "anything_past_keys = C::kCached ||", "anything_past_keys ="),
    "O stored before it is there": (
        HOPPER, "sm90/forward.cuh",
        "ptx::mbarrier_wait(shared.o_full(q_ring.stage, warpgroup), q_ring.parity);", ""),
    "O written over V of the other warpgroup": (
        HOPPER_WIDE, "sm90/forward.cuh", "ptx::mbarrier_wait(shared.v_full(place), v_ring.parity);", ""),
    "V written over O that is not stored": (
        HOPPER_WIDE, "sm90/forward.cuh",
        "if (ForwardShared<C>::kOutputInValues) turns_of_output += C::kWarpgroups;", ""),
    "Q written over one that is read": (
        HOPPER_WIDE, "sm90/forward.cuh", "release_q(block + 1 == own_last);",
        "release_q(block == first_block);"),
    "LSE of the tile after": (
        HOPPER, "sm90/forward.cuh", "(work_stage * C::kRows + row) * 4", "row * 4"),
    "a remainder of other keys": (
        HOPPER, "sm90/forward.cuh", "ptx::cvt_unpack<C::kDType>(weights[0][i])",
        "ptx::cvt_unpack<C::kDType>(weights[1][i])"),
    "a K that is taken for the one before": (
        HOPPER, "sm90/forward.cuh", "k_is_there = false;\n  };", "};"),
    "NaN in V past a sequence's end": (
        HOPPER, "sm90/forward.cuh", "if (first > 0 || last < C::kKeys)", "if (first > last)"),
    "negative numbers ordered like their bits": (
        HOPPER, "sm90/softmax.cuh", "if (!were_positive && !positive(reached))", "if (false)"),
    "the maximum of three lanes": (
        HOPPER, "sm90/softmax.cuh", "ptx::max_from(ptx::max_from(x, a, b), c, c)", "ptx::max_from(x, a, b)"),
    "an output relative to an old maximum": (
        HOPPER, "sm90/forward.cuh", "if (softmax.grown[half])", "if (softmax.grown[half] && half == 0)"),
    "swizzle of four rows": (
        HOPPER, "sm90/wgmma.cuh", "(index % 8 ^ (row & 7)) << 4", "(index % 8 ^ (row & 3)) << 4"),
    "weights that are not awaited": (
        HOPPER_DECODE, "sm90/decode.cuh",
        "ptx::mbarrier_wait(shared.weights_full(stage), tile / Shared::kStages % 2);", ""),
    "weights relative to another reference": (
        HOPPER_DECODE, "sm90/decode.cuh",
        "if (__any_sync(0xFFFFFFFFu, larger[0] > reference[0] || larger[1] > reference[1]))", "if (false)"),
    "NaN in values past a sequence's end": (
        HOPPER_DECODE, "sm90/decode.cuh",
        "const bool dirty = key < part_first || key + C::kKeys > part_last;", "const bool dirty = false;"),
    "a tile of keys written over one that is read": (
        HOPPER_DECODE, "sm90/decode.cuh",
        "ptx::mbarrier_wait(shared.empty(ring.stage, group), ring.parity ^ 1);", "{}"),
    "the sum of one warpgroup": (
        HOPPER_DECODE, "sm90/decode.cuh", "shared.total(part_ring.stage, 1,",
        "shared.total(part_ring.stage, 0,"),
    "sums of the part before": (
        HOPPER_DECODE, "sm90/decode.cuh", "((part_stage * 2 + warpgroup) * C::kRows",
        "(warpgroup * C::kRows"),
    "a page of the rows before": (
        HOPPER_DECODE, "sm90/decode.cuh", "place = rows.find(key, d.page_size);",
        "place = rows.find(max(key - 8, part.first), d.page_size);"),
    "Q of the step after": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh",
        "ptx::mbarrier_wait(shared.q_empty(q.stage), q.parity ^ 1);", ""),
    "dS of one warpgroup": (  # which most orders of the warps hide
        HOPPER_BACKWARD.replace("d128", "d96"), "sm90/backward.cuh",
        "ptx::mbarrier_wait(shared.ds_full(place.stage), place.parity);\n    multiply_dq<C>(dq, shared",
        "{}\n    multiply_dq<C>(dq, shared"),
    "dS written over the last one": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh",
        "ptx::mbarrier_wait(shared.ds_empty(place.stage), place.parity ^ 1);", ""),
    "dK written over K of the other warpgroup": (
        HOPPER_BACKWARD, "sm90/backward.cuh", "wait_for_readers<C>(shared, lane);  // both", "//"),
    "the last turn that is not passed": (
        HOPPER_BACKWARD, "sm90/backward.cuh", "if (warpgroup == 0) pass_turn();", ""),
    "NaN in Q past a sequence's end": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh",
        "clear_rows_outside<C::kRows>(shared.q(q.stage), first, last, lane);", "ptx::fence_proxy_async();"),
    "NaN in keys past a sequence's end": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh",
        "clear_rows_outside<C::kKeys>(shared.v(), first_key, last_key, lane);", "ptx::fence_proxy_async();"),
    "statistics of another column": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh", "row % 8 / 2 * 4 + row / 8 * 2 + row % 2",
        "row % 8 / 2 * 4 + row % 2 * 2 + row / 8"),
    "dV written over V of the other warpgroup": (
        WIDE_BACKWARD, "sm90/backward.cuh",
        "wait_for_readers<C>(shared, lane);  // the other one has read V", "//"),
    "sums for which nobody's turn comes": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh", "if (step > 0) pass_on(turn);", ""),
    "a turn that nobody awaits": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh",
        "ptx::mbarrier_wait(shared.turn_full(ring.stage), ring.parity);", ""),
    "K of other columns": (
        HALVES_BACKWARD, "sm90/backward_block.cuh", "(kQueryColumns < 64 ? first % 64 * 2 : 0)", "0"),
    "turns that are counted from another block": (
        HOPPER_BACKWARD, "sm90/backward_block.cuh", "const int before = block.key / C::kKeys -",
        "const int before = 1 + block.key / C::kKeys -"),
    "a softcap without its derivative": (
        HOPPER_GENERAL, "sm90/backward_block.cuh", "weight[e] * fmaf(-tanh, tanh, 1.f)", "weight[e]"),
    "ALiBi of the first head": (
        HOPPER_GENERAL, "sm90/backward_block.cuh", "block.batch * alibi.batch + head * alibi.head",
        "block.batch * alibi.batch"),
    "ALiBi of another key": (
        HOPPER_GENERAL, "sm90/backward_block.cuh", "e % 2 - e / 2 % 2 * 8)", "e % 2 + e / 2 % 2 * 8)"),
    "out of turn": (  # float16 shows more of the sums' last bits
        BACKWARD.replace("bf16", "f16"), "mma/backward.cuh", "if (p.deterministic) turn.wait();", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    rows, *fault = FAULTS[name]
    result = run(build.build(tmp_path, f"^{rows}$", "-O1", tuple(fault)), "--stop")
    assert result.returncode == 1 and "WRONG" in result.stdout, f"it is not seen: {result.stdout[-2000:]}"
