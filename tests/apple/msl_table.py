"""Every Metal name and construct of the kernels: the version that brought it, text that shows it.

`shown_by` names a file of a public project whose text Apple's compiler takes: MLX (ml-explore/mlx,
under mlx/backend/metal/kernels), llama.cpp (ggml-org/llama.cpp, under ggml/src/ggml-metal/kernels),
SPIRV-Cross (KhronosGroup/SPIRV-Cross, under reference: texts that its tests compile with Apple's
tools; spirv_msl.cpp holds the versions), Lily (perplexityai/pplx-garden, under lily/src/kernels/metal).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    kind: str
    name: str
    since: int  # __METAL_VERSION__ on macOS
    shown_by: str
    types: tuple[str, ...] = ()  # an attribute's parameter may have


INDEX, POSITION = ("uint", "ushort"), ("uint3",)

ROWS = [
    Row("header", "<metal_stdlib>", 100, "MLX bf16.h"),
    Row("header", "<metal_tensor>", 400, "Lily quant.metal"),
    Row("header", "<MetalPerformancePrimitives/MetalPerformancePrimitives.h>", 400, "Lily quant.metal"),
    Row("namespace", "metal", 100, "MLX arg_reduce.metal"),
    Row("namespace", "mpp", 400, "MLX steel/gemm/nax.h"),
    Row("namespace", "tensor_ops", 400, "MLX steel/gemm/nax.h"),
    # ---- qualifiers and attributes ----
    Row("qualifier", "kernel", 100, "llama.cpp argsort.metal"),
    Row("qualifier", "device", 100, "llama.cpp argsort.metal"),
    Row("qualifier", "constant", 100, "llama.cpp argsort.metal"),
    Row("qualifier", "threadgroup", 100, "llama.cpp argsort.metal"),
    Row("qualifier", "thread", 100, "MLX arg_reduce.metal"),
    Row("attribute", "buffer", 100, "MLX conv.metal"),
    Row("attribute", "threadgroup_position_in_grid", 100, "llama.cpp mul_mm.metal", POSITION),
    Row("attribute", "thread_index_in_threadgroup", 100, "llama.cpp mul_mm.metal", INDEX),
    Row("attribute", "thread_index_in_simdgroup", 200, "llama.cpp argsort.metal", INDEX),
    Row("attribute", "simdgroup_index_in_threadgroup", 200, "llama.cpp mul_mm.metal", INDEX),
    Row("pragma", "#pragma clang loop unroll(full)", 100, "MLX fp_quantized.h"),
    Row("pragma", "#pragma clang loop unroll(disable)", 100, "MLX steel/defines.h"),
    # ---- types ----
    Row("type", "uchar", 100, "SPIRV-Cross opt/shaders-msl/comp/extended-shuffle-types.msl23.comp"),
    Row("type", "ushort", 100, "llama.cpp argsort.metal"),
    Row("type", "uint", 100, "llama.cpp argsort.metal"),
    Row("type", "ulong", 220, "Lily skinny.metal"),
    Row("type", "half", 100, "llama.cpp fa_f16.metal"),
    Row("type", "bfloat", 310, "MLX bf16.h"),
    Row("type", "float2", 100, "MLX fft/readwrite.h"),
    Row("type", "float4", 100, "MLX dot.h"),
    Row("type", "uint2", 100, "MLX binary.h"),
    Row("type", "uint3", 100, "llama.cpp argsort.metal"),
    Row("type", "uint4", 100, "Lily skinny.metal"),
    Row("type", "atomic_uint", 100, "llama.cpp argsort.metal"),
    Row("type", "simdgroup_matrix", 230, "MLX steel/gemm/mma.h"),
    Row("type", "simdgroup_float8x8", 230, "llama.cpp mul_mm.metal"),
    Row("type", "mem_flags", 100, "llama.cpp argsort.metal"),
    Row("type", "array", 400, "Lily attention.metal"),
    Row("type", "dextents", 400, "Lily quant.metal"),
    Row("type", "tensor", 400, "Lily quant.metal"),
    Row("type", "tensor_inline", 400, "MLX steel/gemm/nax.h"),
    Row("type", "execution_simdgroup", 400, "MLX steel/gemm/nax.h"),
    Row("type", "matmul2d_descriptor", 400, "MLX steel/gemm/nax.h"),
    Row("type", "matmul2d", 400, "MLX steel/gemm/nax.h"),
    # ---- constants ----
    Row("constant", "INFINITY", 100, "llama.cpp argsort.metal"),
    Row("constant", "NAN", 100, "MLX reduction/ops.h"),
    Row("constant", "FLT_MAX", 100, "llama.cpp argsort.metal"),
    Row("constant", "mem_threadgroup", 100, "llama.cpp argsort.metal"),
    Row("constant", "mem_device", 100, "SPIRV-Cross opt/shaders-msl/comp/barriers.comp"),
    Row("constant", "dynamic_extent", 400, "Lily gemm.metal"),
    Row("constant", "multiply_accumulate", 400, "MLX steel/gemm/nax.h"),
    Row("constant", "memory_order_relaxed", 100, "llama.cpp argsort.metal"),
    # ---- functions ----
    Row("function", "as_type", 100, "llama.cpp argsort.metal"),
    Row("function", "fma", 100, "MLX erf.h"),
    Row("function", "rint", 100, "MLX unary_ops.h"),
    Row("function", "isfinite", 100, "MLX fp8.h"),
    Row("function", "max", 100, "llama.cpp argsort.metal"),
    Row("function", "min", 100, "MLX binary_ops.h"),
    Row("function", "clamp", 100, "MLX fp_quantized.h"),
    Row("function", "popcount", 100, "SPIRV-Cross shaders-msl-no-opt/asm/comp/bitfield-signed-operations.asm.comp"),
    Row("function", "mulhi", 100, "SPIRV-Cross opt/shaders-msl/asm/comp/uint_smulextended.asm.comp"),
    Row("function", "threadgroup_barrier", 100, "llama.cpp argsort.metal"),
    Row("function", "simd_sum", 210, "llama.cpp argsort.metal"),
    Row("function", "simd_max", 210, "llama.cpp argsort.metal"),
    Row("function", "simd_min", 210, "MLX quantized.h"),
    Row("function", "simd_shuffle", 200, "MLX scan.h"),
    Row("function", "simd_shuffle_xor", 200, "llama.cpp argsort.metal"),
    Row("function", "simd_shuffle_up", 200, "MLX utils.h"),
    Row("function", "atomic_load_explicit", 100, "llama.cpp argsort.metal"),
    Row("function", "atomic_store_explicit", 100, "llama.cpp argsort.metal"),
    Row("function", "atomic_fetch_add_explicit", 100, "llama.cpp argsort.metal"),
    Row("function", "simdgroup_load", 230, "llama.cpp mul_mm.metal; transposed: fa_common.metal"),
    Row("function", "simdgroup_multiply_accumulate", 230, "llama.cpp fa_common.metal; bfloat into float: fa_f16.metal"),
    Row("function", "get_destination_cooperative_tensor", 400, "Lily quant.metal"),
    Row("function", "get_multidimensional_index", 400, "Lily quant.metal"),
    Row("function", "thread_elements", 230, "MLX conv.metal"),
    # ---- constructs ----
    Row("construct", "function template", 100, "MLX sdpa_vector.h"),
    Row("construct", "class template", 100, "MLX steel/gemm/mma.h"),
    Row("construct", "constexpr function", 100, "MLX steel/gemm/mma.h"),
    Row("construct", "enum", 100, "llama.cpp common.h"),
    Row("construct", "reference to an array", 100, "Lily skinny.metal"),
    Row("construct", "pointer as result", 100, "SPIRV-Cross shaders-msl/asm/comp/variable-pointers-store-forwarding.asm.comp"),
    Row("construct", "pointer in a struct", 200, "SPIRV-Cross opt/shaders-msl/comp/buffer_device_address.msl2.comp"),
]  # fmt: skip
