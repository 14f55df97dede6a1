"""wgmma.h: the wgmma instructions of Hopper GPUs as C++ functions, one for each width."""

from __future__ import annotations

__all__ = ["WIDTHS", "wgmma_header"]

WIDTHS = (*range(32, 129, 32), 136, *range(144, 257, 16))  # N of the instructions


def wgmma_header(fp8: bool = False) -> str:
    """Return wgmma.h: wgmma<N, A transposed, B transposed>(d, a, b) for d += a b, and start for
    d = a b, for each N of WIDTHS. fp8: of e4m3, which neither operand may be transposed."""
    parts = ['#ifdef HALF_FLOATS\n#define TYPE "f16"\n#else\n#define TYPE "bf16"\n#endif\n']
    parts += [_instruction(name, width, fp8) for width in WIDTHS for name in ("wgmma", "start")]
    for name in ("wgmma", "start"):
        cases = "".join(
            f"  if constexpr (W == {width}) {name}_{width}<TA, TB>(d, a, b);\n" for width in WIDTHS
        )
        known = " || ".join(f"W == {width}" for width in WIDTHS)
        parts.append(
            "template <int W, int TA, int TB>\n"
            f"__device__ __forceinline__ void {name}(float (&d)[W / 2], unsigned long long a, "
            f"unsigned long long b) {{\n"
            f'  static_assert({known}, "a width that wgmma.h has no instruction '
            f'for");\n{cases}}}\n'
        )
    parts.append("""
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT, int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
  if (LEFT == 0) {  // no sum is read before
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
  }
}
""")
    return "".join(parts)


def _instruction(name: str, width: int, fp8: bool) -> str:
    count, constraint, add = width // 2, ("+f" if name == "wgmma" else "=f"), int(name == "wgmma")
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"{constraint}"(d[{i}])' for i in range(count))
    kind = "k32.f32.e4m3.e4m3 " if fp8 else 'k16.f32." TYPE "." TYPE " '
    turns = "" if fp8 else f", %{count + 2}, %{count + 3}"
    immediates = "" if fp8 else ', "n"(TA), "n"(TB)'
    return (
        "template <int TA, int TB>\n"
        f"__device__ __forceinline__ void {name}_{width}(float (&d)[{count}], unsigned long long "
        f"a, unsigned long long b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}{kind}'
        f"{{{registers}}}, "
        f'%{count}, %{count + 1}, {add}, 1, 1{turns};"\n'
        f'    : {sums} : "l"(a), "l"(b){immediates});\n}}\n'
    )
