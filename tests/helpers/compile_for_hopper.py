"""Compile every kernel for sm_90 without a GPU, in the shapes that the launch tables use.

Run as a program with TRITON_INTERPRET=0 and ``triton`` or ``gluon``, the language; prints one line a kernel and fails
on the first that does not compile. ``gluon`` exits with :data:`CANNOT` after one line where this Triton has no Gluon
that can be compiled without a device.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from prefill_kernels import (
    triton_flash_prefill,
    triton_kap,
    triton_kv_union,
    triton_masks,
    triton_mass,
    triton_osk,
    triton_page_attention,
    triton_regroup,
    triton_select,
    triton_unions,
    triton_vertical_slash,
    triton_vertical_slash_select,
    triton_xattn,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "samples", "keys", "means"), "*bf16"),
    **dict.fromkeys(("table", "order", "counts", "stats"), "*i32"),
    **dict.fromkeys(("scratch", "score", "mass"), "*fp32"),
    **dict.fromkeys(("hrm", "mask"), "*i8"),
    **dict.fromkeys(("windows", "window_count", "columns", "gathered", "gathered_count", "below"), "*i32"),
    **dict.fromkeys(("offsets", "starts", "befores"), "*i32"),
    **dict.fromkeys(("maxima", "sums", "shifts", "column", "diagonal"), "*fp32"),
    **dict.fromkeys(("covered", "member", "column_member"), "*i8"),
    **dict.fromkeys(("words", "head_list"), "*i64"),
    "limit": "*fp64",
}
PAGE_POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out"), "*bf16"),
    **dict.fromkeys(("pages", "members", "ids", "positions", "kv_lens", "requests", "selected", "counts"), "*i32"),
    **dict.fromkeys(("table", "windows", "slots", "starts", "items", "chunk_ends"), "*i32"),
    **dict.fromkeys(("totals", "cells", "sizes", "bitmaps"), "*i64"),
    **dict.fromkeys(("k_scale", "v_scale", "partial", "maxima", "sums"), "*fp32"),
}
E4M3 = {"k": "*fp8e4nv", "v": "*fp8e4nv"}
PAGE_STRIDES = ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_dim", "v_head")
ALIGNED = (
    *PAGE_STRIDES, "q_batch", "q_head", "q_row", "kv_page", "kv_slot", "kv_head", "out_batch", "out_head", "out_row"
)  # fmt: skip
WITHOUT_PRODUCT = (
    triton_select.select_kernel,
    triton_kap.sample_kernel,
    triton_masks.compact_kernel,
    triton_vertical_slash.windows_kernel,
    triton_vertical_slash.bits_kernel,
    triton_vertical_slash.gather_kernel,
    triton_vertical_slash_select.merge_kernel,
    triton_regroup.regroup_kernel,
    triton_unions.unions_kernel,
    triton_unions.stats_kernel,
    triton_kv_union.reduce_kernel,
)
FLOATS = ("scale", "threshold")
CANNOT = 77


def build(kernel: Any, label: str, num_warps: int, **constants: Any) -> None:
    """Compile one kernel with 16-byte aligned pointers and strides."""
    assemble(kernel, label, num_warps, POINTERS, constants)


def build_pages(kernel: Any, label: str, num_warps: int, **constants: Any) -> None:
    """The same for a page-level kernel, whose keys and values may be E4M3."""
    fp8 = constants.get("FP8", False) and "k" in kernel.arg_names
    ptx = assemble(kernel, label, num_warps, PAGE_POINTERS | (E4M3 if fp8 else {}), constants)
    # Tiles of fewer rows multiply E4M3 numbers in half precision.
    assert not fp8 or constants["ROWS"] < 64 or "e4m3.e4m3" in ptx, label


def assemble(kernel: Any, label: str, num_warps: int, pointers: dict[str, str], constants: dict[str, Any]) -> str:
    """Compile one kernel and print what it takes; its PTX."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "fp32" if name in FLOATS else "i32")
        if name in pointers or name in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
    print(f"{label}: {len(built.asm['cubin'])} bytes, {built.metadata.shared} bytes of shared memory", flush=True)
    assert built.metadata.shared <= 227 * 1024, label
    small = constants.get("D", 128) < 64 or constants.get("ROWS", 128) < 64
    assert "wgmma" in built.asm["ptx"] or kernel in WITHOUT_PRODUCT or small, label
    return str(built.asm["ptx"])


def gluon() -> None:
    """Compile the Gluon kernels for all they are specialised on: vote, head_dim, page size and dtype."""
    try:
        from prefill_kernels import hopper_osk
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon._runtime import GluonASTSource
    except (ImportError, AttributeError) as error:
        print(f"Triton {triton.__version__} has no Gluon that compiles ahead of time here: {error}")
        sys.exit(CANNOT)
    names = hopper_osk._osk.arg_names
    for dtype, dim, page, skip in (("bf16", 128, 128, True), ("bf16", 128, 128, False), ("fp16", 64, 16, True)):
        element, box = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype], min(hopper_osk.BLOCK, page)

        def descriptor(rows: int, dim: int = dim, dtype: str = dtype, element: Any = element) -> str:
            layout = gl.NVMMASharedLayout.get_default_for([rows, dim], element)
            return f"tensordesc<{dtype}[{rows}, {dim}],{layout!r}>"

        constants = {
            "HEADS": 32, "GROUP": 4, "D": dim, "PAGE": page, "BOX": box, "KS": hopper_osk.K_STAGES,
            "VS": hopper_osk.V_STAGES, "SKIP": skip, "RING": hopper_osk.RING,
        }  # fmt: skip
        types = {
            "q_desc": descriptor(64),
            **dict.fromkeys(("k_main", "v_main", "k_tail", "v_tail"), descriptor(box)),
            "out": f"*{dtype}",
            **dict.fromkeys(("order", "counts", "table", "stats"), "*i32"),
            **dict.fromkeys(FLOATS, "fp32"),
            **dict.fromkeys(constants, "constexpr"),
        }
        signature = {name: types.get(name, "i32") for name in names}
        aligned = ("out", "order", "counts", "table", "stats", "out_stride", "out_head_stride")
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = GluonASTSource(hopper_osk._osk, signature, constants, attributes)
        built = triton.compile(source, target=TARGET, options={"num_warps": 4})
        label = f"osk_hopper {dtype} d={dim} page={page} skip={skip}"
        print(f"{label}: {len(built.asm['cubin'])} bytes, {built.metadata.shared} bytes of shared memory", flush=True)
        assert built.metadata.shared <= 227 * 1024, label
        assert "wgmma" in built.asm["ptx"] and "cp.async.bulk.tensor" in built.asm["ptx"], label
    for fp8, dim, heads in ((False, 128, 16), (True, 128, 16), (True, 64, 3)):
        gluon_pages(fp8, dim, heads)


def gluon_pages(fp8: bool, dim: int, heads: int) -> None:
    """Compile the page-level Gluon kernel in one precision."""
    from prefill_kernels import hopper_page_attention as kernel
    from prefill_kernels.unions import BINS
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    page, (k_stages, v_stages) = kernel.PAGE, kernel.STAGES[fp8]
    stored = (gl.float8e4nv, "fp8e4nv") if fp8 else (gl.bfloat16, "bf16")

    def layout(box: list[int], element: Any) -> Any:
        return gl.NVMMASharedLayout.get_default_for(box, element)

    def descriptor(box: list[int], element: Any, dtype: str) -> str:
        return f"tensordesc<{dtype}[{', '.join(map(str, box))}],{layout(box, element)!r}>"

    values = descriptor([dim, page] if fp8 else [page, dim], *stored)
    integers = ("ids", "positions", "pages", "members", "counts", "requests", "kv_lens", "table", "sizes", "lines")
    constants = {
        "D": dim, "HEADS": heads, "KV_HEADS": 2, "page_layout": layout([page, dim], stored[0]), "FP8": fp8,
        "PREDICATE": kernel.PREDICATE, "KS": k_stages, "VS": v_stages, "RING": max(4, k_stages, v_stages - 1),
        "AHEAD": kernel.AHEAD, "BINS": BINS,
    }  # fmt: skip
    types = {
        "q_desc": descriptor([1, kernel.HEAD_ROWS, 64], gl.bfloat16, "bf16"),
        "k_desc": descriptor([*kernel.KEY_BOX, dim] if fp8 else [page, dim], *stored),
        **dict.fromkeys(("v_desc", "v_tail"), values),
        "out": "*bf16",
        **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("k_scale", "v_scale"), "*fp32" if fp8 else "*i32"),
        "scale": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    names = kernel._union_attention.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    aligned = ("out", "k_scale", "v_scale", "out_stride", "out_head_stride", *integers)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel._union_attention, signature, constants, attributes)
    built = triton.compile(source, target=TARGET, options={"num_warps": 4})
    label = f"union_attention fp8={fp8} d={dim} heads={heads}"
    print(f"{label}: {len(built.asm['cubin'])} bytes, {built.metadata.shared} bytes of shared memory", flush=True)
    assert built.metadata.shared <= 227 * 1024, label
    assert "wgmma" in built.asm["ptx"] and "cp.async.bulk.tensor" in built.asm["ptx"], label
    assert not fp8 or "e4m3.e4m3" in built.asm["ptx"], label


def main() -> None:
    """Compile all that is plain Triton."""
    for dim in (64, 128):
        options = triton_osk.launch_options(dim, 128)
        shape = {"GROUP": 4, "D": dim, "PAGE": 64, "BLOCK": 128, "STAGES": options["STAGES"]}
        for skip in (False, True) if dim == 128 else (True,):
            build(triton_osk.osk_kernel, f"osk d={dim} skip={skip}", options["num_warps"], SKIP=skip, **shape)
        build(triton_osk.logical_kernel, f"logical d={dim}", options["num_warps"], **shape)
        mass_options = triton_mass.launch_options(128)
        mass_shape = {"GROUP": 4, "D": dim, "PAGE": 64, "BLOCK": 128, "STAGES": mass_options["STAGES"]}
        build(triton_mass.mass_kernel, f"mass d={dim}", mass_options["num_warps"], **mass_shape)
    for stride in (8, 16):
        per = 128 // stride
        tiles = max(1, 128 // (4 * per))
        build(
            triton_kap.kap_kernel, f"kap stride={stride}", triton_kap.num_warps(4 * per * tiles),
            GROUP=4, HEADS=4, TILES=tiles, D=128, BLOCK=128, STRIDE=stride, BN=128, CHUNK=64, STAGES=3, SCAN=2,
        )  # fmt: skip
        build(triton_kap.sample_kernel, f"sample stride={stride}", 4, D=128, PAGE=64, STRIDE=stride, ROWS=64)
    for stride in (4, 8, 16):
        per = 128 // stride
        tiles = max(1, 128 // (4 * per))
        build(
            triton_xattn.xattn_kernel, f"xattn stride={stride}", triton_xattn.num_warps(4 * per * tiles),
            GROUP=4, HEADS=4, TILES=tiles, D=128, BLOCK=128, STRIDE=stride, BN=128, CHUNK=64, STAGES=3,
        )  # fmt: skip
    flash_warps = triton_flash_prefill.num_warps(128)
    build(triton_flash_prefill.mean_key_kernel, "mean_key d=128", flash_warps, D=128, BLOCK=128, BN=64)
    build(triton_masks.compact_kernel, "compact n=1024", triton_masks.num_warps(1024), N=1024)
    for rule in (0, 1, 2):
        build(triton_select.select_kernel, f"select rule={rule}", 1, N=256, RULE=rule, FORCE=rule == 0, VISIT=rule)
    for dim in (64, 128):
        for block in (64, 128):
            options = triton_vertical_slash.launch_options(dim, block)
            build(
                triton_vertical_slash.vertical_slash_kernel, f"vertical_slash d={dim} M={block}", options["num_warps"],
                GROUP=4, D=dim, PAGE=64, BLOCK=block, STEP=64, STAGES=options["STAGES"], WHOLE=dim == 64,
            )  # fmt: skip
        shape = {"GROUP": 4, "D": dim, "PAGE": 64, "ROWS": 64}
        build(triton_vertical_slash_select.maxima_kernel, f"maxima d={dim}", 4, KEYS=64, **shape)
        build(triton_vertical_slash_select.sums_kernel, f"sums d={dim}", 4, **shape)
    build(triton_vertical_slash_select.merge_kernel, "merge", 4, SPLITS=64, ROWS=64)
    build(triton_vertical_slash.windows_kernel, "windows", 4, BLOCK=64, STEP=64, CHUNK=512)
    build(triton_vertical_slash.bits_kernel, "bits", 4, CHUNK=32)
    build(triton_vertical_slash.gather_kernel, "gather", 4, BLOCK=128, CHUNK=1024, STEP=64, WHOLE=True)
    pages()


def pages() -> None:
    """Page-level kernels."""
    for window in (64, 128):
        for words in (2, 16, 32):
            build_pages(
                triton_regroup.regroup_kernel, f"regroup W={window} words={words}",
                triton_regroup.launch_options(window)["num_warps"],
                K=16, W=window, WORDS=words, GROUP=8, HARDWARE=True,
            )  # fmt: skip
    unions_warps = triton_unions.launch_options(128)["num_warps"]
    build_pages(triton_unions.unions_kernel, "unions K=16", unions_warps, K=16, WIDE=16, GROUP=8)
    build_pages(triton_unions.stats_kernel, "stats tile=128", 4, WIDE=128, GROUP=8, TILE=128)
    for fp8 in (False, True):
        # Values lie transposed in E4M3.
        shape: dict[str, Any] = {"GROUP": 8, "FP8": fp8, "v_slot" if fp8 else "v_dim": 1}
        for ratio, dim, size in ((16, 128, 128), (4, 128, 64), (3, 64, 64)):
            options = triton_page_attention.launch_options(ratio, dim, size, fp8)
            warps = options.pop("num_warps")
            label = f"ratio={ratio} d={dim} fp8={fp8}"
            both = shape | {"RATIO": ratio, "D": dim, "PAGE": size, "SIZE": size, "ROWS": options["ROWS"]}
            build_pages(
                triton_page_attention.page_attention_kernel, f"page_attention {label}", warps,
                **both | options,
            )  # fmt: skip
            build_pages(triton_kv_union.kv_union_kernel, f"kv_union {label}", warps, CHUNK=64, **both)
    build_pages(triton_kv_union.reduce_kernel, "reduce ratio=16", 4, QUERIES=2, RATIO=16, ROWS=32, D=128, FP8=True)


if __name__ == "__main__":
    {"triton": main, "gluon": gluon}[sys.argv[1]]()
