"""Compile every plain Triton kernel for sm_90 without a GPU, in the shapes that the launch tables use.

Run as a program with TRITON_INTERPRET=0; prints one line a kernel and fails on the first that does not compile.
"""

from __future__ import annotations

from typing import Any

import triton
from prefill_kernels import triton_kap, triton_osk, triton_select
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "samples"), "*bf16"),
    **dict.fromkeys(("table", "order", "counts", "stats"), "*i32"),
    **dict.fromkeys(("scratch", "score"), "*fp32"),
    **dict.fromkeys(("hrm", "mask"), "*i8"),
    "limit": "*fp64",
}
ALIGNED = ("q_batch", "q_head", "q_row", "kv_page", "kv_slot", "kv_head", "out_batch", "out_head", "out_row")
WITHOUT_PRODUCT = (triton_select.select_kernel, triton_kap.sample_kernel)
FLOATS = ("scale", "threshold")


def build(kernel: Any, label: str, num_warps: int, **constants: Any) -> None:
    """Compile one kernel with 16-byte aligned pointers and strides."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = POINTERS.get(name, "fp32" if name in FLOATS else "i32")
        if name in POINTERS or name in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
    print(f"{label}: {len(built.asm['cubin'])} bytes, {built.metadata.shared} bytes of shared memory", flush=True)
    assert built.metadata.shared <= 227 * 1024, label
    assert "wgmma" in built.asm["ptx"] or kernel in WITHOUT_PRODUCT or constants.get("D", 128) < 64, label


def main() -> None:
    """Compile all."""
    for dim in (64, 128):
        options = triton_osk.launch_options(dim, 128)
        shape = {"GROUP": 4, "D": dim, "PAGE": 64, "BLOCK": 128, "STAGES": options["STAGES"]}
        for skip in (False, True) if dim == 128 else (True,):
            build(triton_osk.osk_kernel, f"osk d={dim} skip={skip}", options["num_warps"], SKIP=skip, **shape)
        build(triton_osk.logical_kernel, f"logical d={dim}", options["num_warps"], **shape)
    for stride in (8, 16):
        per = 128 // stride
        tiles = max(1, 128 // (4 * per))
        build(
            triton_kap.kap_kernel, f"kap stride={stride}", triton_kap.num_warps(4 * per * tiles),
            GROUP=4, HEADS=4, TILES=tiles, D=128, BLOCK=128, STRIDE=stride, BN=128, CHUNK=64, STAGES=3, SCAN=2,
        )  # fmt: skip
        build(triton_kap.sample_kernel, f"sample stride={stride}", 4, D=128, PAGE=64, STRIDE=stride, ROWS=64)
    for rule in (0, 1, 2):
        build(triton_select.select_kernel, f"select rule={rule}", 1, N=256, RULE=rule, FORCE=rule == 0, VISIT=rule)


if __name__ == "__main__":
    main()
