"""Compile the cases of one module; print what is wrong with each."""

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_fluid.cuda.triton_launch import parameter_bytes
from tests.support.kernel_cases import KernelCase

_DIVISIBLE = [["tt.divisibility", 16]]


def compile_case(case: KernelCase) -> dict[str, Any]:
    """PTX, bytes of stack per thread and of each parameter of `case`, compiled for sm_90."""
    names = [name for name in case.kernel.arg_names if name not in case.constants]
    if len(names) != len(case.arguments):
        raise ValueError(f"{case.name}: {len(case.arguments)} types for the arguments {names}")
    signature = {
        name: kind.removesuffix(":16") for name, kind in zip(names, case.arguments, strict=True)
    }
    attrs = {
        (case.kernel.arg_names.index(name),): _DIVISIBLE
        for name, kind in zip(names, case.arguments, strict=True)
        if kind.endswith(":16")
    }
    ones = {name: 1 for name, kind in signature.items() if kind == "1"}
    constexprs = {**case.constants, **ones}
    signature |= dict.fromkeys(constexprs, "constexpr")
    constants = {(case.kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    source = ASTSource(case.kernel, signature, constants, attrs)
    options = {"num_warps": case.num_warps, "maxnreg": case.maxnreg}
    options["extern_libs"] = dict(case.libraries)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        usage = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = {name: int(n) for name, n in re.findall(r"\b(STACK|LOCAL|REG):(\d+)", usage)}
    ptx: str = compiled.asm["ptx"]
    entry = ptx[ptx.index(".entry") :].partition(")")[0]
    return {
        "ptx": ptx,
        "types": [kind for kind in signature.values() if kind != "constexpr"],
        "parameters": [int(bits) // 8 for bits in re.findall(r"\.param \.[ubf](\d+)", entry)],
        "spills": figures["STACK"] + figures["LOCAL"],
        "registers": figures["REG"],
    }


def problems(case: KernelCase) -> Iterator[str]:
    """What `case` was compiled to and should not have been."""
    compiled = compile_case(case)
    yield from (f"no {text} in its PTX" for text in case.wanted if text not in compiled["ptx"])
    yield from (f"{text} in its PTX" for text in case.unwanted if text in compiled["ptx"])
    if compiled["spills"] > case.spills:
        yield f"{compiled['spills']} bytes of local memory, allowed: {case.spills}"
    if compiled["parameters"] != parameter_bytes(compiled["types"]):
        yield f"parameters of {compiled['parameters']} bytes"
    if case.maxnreg is not None and compiled["registers"] > case.maxnreg:
        yield f"{compiled['registers']} registers, allowed: {case.maxnreg}"


def main(family: str, part: int = 0, parts: int = 1) -> None:
    """Exit with an error that names every problem of a part of a module's cases."""
    module = importlib.import_module(f"tests.support.kernel_cases.{family}")
    found = [
        f"{case.name}: {problem}"
        for case in module.CASES[part::parts]
        for problem in problems(case)
    ]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main(sys.argv[1])
